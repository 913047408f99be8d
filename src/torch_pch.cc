// Gives the precompiled header a translation unit.
