#include "src/dispatch/device_share.h"

#include <algorithm>

namespace weft::sched {

DeviceShare::DeviceShare(double sampling_share)
    : training_{.share = 1 - sampling_share},
      decoding_{.share = sampling_share} {}

bool DeviceShare::ChooseDecode(bool can_train, bool can_decode) {
  Wake(training_, can_train);
  Wake(decoding_, can_decode);
  const bool decodes =
      can_decode &&
      (!can_train || decoding_.virtual_seconds < training_.virtual_seconds);
  turn_start_ = (decodes ? decoding_ : training_).virtual_seconds;
  return decodes;
}

void DeviceShare::NoteIdle() {
  turn_start_ = std::max(training_.virtual_seconds, decoding_.virtual_seconds);
  training_.has_work = decoding_.has_work = false;
}

void DeviceShare::AddTraining(absl::Duration elapsed) {
  training_.virtual_seconds += absl::ToDoubleSeconds(elapsed) / training_.share;
}

void DeviceShare::AddDecoding(absl::Duration elapsed) {
  decoding_.virtual_seconds += absl::ToDoubleSeconds(elapsed) / decoding_.share;
}

void DeviceShare::Wake(Kind& kind, bool has_work) {
  if (has_work && !kind.has_work) {
    kind.virtual_seconds = std::max(kind.virtual_seconds, turn_start_);
  }
  kind.has_work = has_work;
}

}  // namespace weft::sched
