// The precompiled header needs a translation unit, and this is it.
