// Headers that every Torch module includes, parsed once per build.
#ifndef WEFT_SRC_TORCH_PCH_H_
#define WEFT_SRC_TORCH_PCH_H_

#include <ATen/ATen.h>

#endif  // WEFT_SRC_TORCH_PCH_H_
