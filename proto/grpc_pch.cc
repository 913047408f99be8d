// Exists only so that the precompiled header has a translation unit.
