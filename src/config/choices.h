// The options that are one of a few words.
#ifndef WEFT_SRC_CONFIG_CHOICES_H_
#define WEFT_SRC_CONFIG_CHOICES_H_

namespace weft {

enum class Device { kCpu, kCuda, kAuto };
enum class Dtype { kF32, kBf16, kAuto };

// Whether a CPU computes products with bf16 weights in bf16, with f32 sums.
// kAuto: if it has instructions for it. kOff: weights are widened to f32.
enum class CpuBf16 { kAuto, kOff };

// Where weights come from. kAuto reads the files of the model's folder. kDummy
// draws random numbers in the shapes that config.json gives.
enum class LoadFormat { kAuto, kDummy };

// How the matrices of the base model are held: in --dtype, or in 8 bits.
enum class BaseWeights { kDtype, kInt8 };

// Selects the layers that keep only their input and run again in the backward
// pass. kAuto: as few layers as the memory budget allows.
enum class GradientCheckpointing { kOff, kAll, kAuto };

// kAuto: text on a terminal, JSON lines otherwise.
enum class LogStyle { kAuto, kText, kJson };

}  // namespace weft

#endif  // WEFT_SRC_CONFIG_CHOICES_H_
