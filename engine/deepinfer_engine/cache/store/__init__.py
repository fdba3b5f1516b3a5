"""Persistent block KV: one interface, a segment log for local disks and one file per block for shared mounts."""
