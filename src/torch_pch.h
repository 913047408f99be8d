// Includes the header of LibTorch that nearly every Torch module needs, so that
// a build parses it only once.
#ifndef WEFT_SRC_TORCH_PCH_H_
#define WEFT_SRC_TORCH_PCH_H_

#include <ATen/ATen.h>

#endif  // WEFT_SRC_TORCH_PCH_H_
