"""Cache of the model's keys: layout, pools of blocks and slots, the paged store itself."""
