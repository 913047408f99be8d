// Types of the options whose value is one of a few words.
#ifndef WEFT_SRC_BASE_CHOICES_H_
#define WEFT_SRC_BASE_CHOICES_H_

namespace weft {

enum class Device { kCpu, kCuda, kAuto };
enum class Dtype { kF32, kBf16, kAuto };

// How a CPU multiplies by bf16 weights. kOff widens the weights to f32. kAuto
// multiplies in bf16 and sums in f32 if the CPU has AVX512_BF16. On other CPUs
// kAuto does what kOff does.
enum class CpuBf16 { kAuto, kOff };

// Where weights come from. kAuto reads the files of the model's folder. kDummy
// draws random numbers in the shapes that config.json gives.
enum class LoadFormat { kAuto, kDummy };

// How the base model's matrices are stored: in the type of --dtype, or in int8.
enum class BaseWeights { kDtype, kInt8 };

// Selects the layers that keep only their input and run again in the backward
// pass. kAuto: as few layers as the memory budget allows.
enum class GradientCheckpointing { kOff, kAll, kAuto };

// Format of log lines. kAuto: text if stderr is a terminal, otherwise JSON.
enum class LogStyle { kAuto, kText, kJson };

}  // namespace weft

#endif  // WEFT_SRC_BASE_CHOICES_H_
