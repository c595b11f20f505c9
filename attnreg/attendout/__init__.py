"""AttendOut: the game of an Attacker with a Defender, and the Generator that learns masks from it."""
