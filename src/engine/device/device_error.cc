#include "src/engine/device/device_error.h"

#include <algorithm>
#include <array>

namespace weft::engine {
namespace {

// Values of cudaError_t after which CUDA's context is unusable. They are
// numbers, because this file is built and tested without CUDA. The comments
// give their names in driver_types.h, without "cudaError".
constexpr std::array kPoisonous = {
    214,  // ECCUncorrectable
    220,  // NvlinkUncorrectable
    226,  // Contained
    700,  // IllegalAddress
    702,  // LaunchTimeout
    709,  // ContextIsDestroyed
    710,  // Assert
    714,  // HardwareStackError
    715,  // IllegalInstruction
    716,  // MisalignedAddress
    717,  // InvalidAddressSpace
    718,  // InvalidPc
    719,  // LaunchFailure
    721,  // TensorMemoryLeak
    810,  // MpsClientTerminated
    911,  // ExternalDevice
    999,  // Unknown
};

}  // namespace

bool IsLost(const DeviceAnswer& answer) {
  return answer.again != 0 ||
         std::ranges::find(kPoisonous, answer.waiting) != kPoisonous.end();
}

}  // namespace weft::engine
