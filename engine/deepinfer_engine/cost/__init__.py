"""Cost model: bytes, arithmetic and seconds of a deployment, as pure functions of integers. No torch.

Every figure says where it comes from (``Source``). Step times are fitted to published points and scaled from there;
nothing in this package was measured.
"""
