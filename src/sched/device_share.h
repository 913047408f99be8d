// Shares device time between training and decoding. Each kind has a virtual
// time that grows by (time used / its share); of two kinds with work the one
// that is behind goes first. A kind that was idle starts where the turn on the
// device started (start-time fair queueing): it collects no credit, but what
// arrives during a micro-batch does not wait for another one.
// Threads: not thread-safe.
#ifndef WEFT_SRC_SCHED_DEVICE_SHARE_H_
#define WEFT_SRC_SCHED_DEVICE_SHARE_H_

#include "absl/time/time.h"

namespace weft::sched {

class DeviceShare {
 public:
  // `sampling_share` in (0, 1): of device time, while both kinds have work.
  explicit DeviceShare(double sampling_share);

  // Whether decoding goes first, given what has work; at least one has.
  bool ChooseDecode(bool can_train, bool can_decode);

  // Nothing has work.
  void NoteIdle();

  void AddTraining(absl::Duration elapsed);
  void AddDecoding(absl::Duration elapsed);

 private:
  struct Kind {
    double share = 0;
    double virtual_seconds = 0;
    bool has_work = false;
  };

  void Wake(Kind& kind, bool has_work);

  Kind training_;
  Kind decoding_;
  double turn_start_ = 0;  // Virtual time at which the latest turn started.
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_DEVICE_SHARE_H_
