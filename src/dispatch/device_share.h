// Shares device time between two kinds of work: training and decoding. Each
// kind has a virtual time, which grows by the device time that the kind used,
// divided by its share. If both kinds have work, the kind with less virtual
// time goes first. When an idle kind gets work, its virtual time is raised to
// at least the virtual time at which the latest turn started (start-time fair
// queueing). So idleness earns no credit, and work that arrives during a
// micro-batch does not wait for a second one. Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_DEVICE_SHARE_H_
#define WEFT_SRC_DISPATCH_DEVICE_SHARE_H_

#include "absl/time/time.h"

namespace weft::sched {

class DeviceShare {
 public:
  // `sampling_share`, in (0, 1), is sampling's share of device time while both
  // kinds have work.
  explicit DeviceShare(double sampling_share);

  // Returns whether decoding goes first. REQUIRES: at least one kind has work.
  bool ChooseDecode(bool can_train, bool can_decode);

  // Notes that neither kind has work.
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
  double turn_start_ = 0;  // The virtual time at which the latest turn started.
};

}  // namespace weft::sched

#endif  // WEFT_SRC_DISPATCH_DEVICE_SHARE_H_
