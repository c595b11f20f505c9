"""One file per way in which models compute attention; each lists the torch functions that it answers for."""
