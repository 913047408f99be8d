// Samples from checkpoints, whose adapters need not be here.
//
// The weights of a checkpoint are an adapter that no client sees
// (AdapterDesk::AddSampler), so samples wait for it, and share batches, places
// on the device and cached prompts, as those of any adapter. Its first move to
// the device reads the checkpoint (ImageFile::checkpoint).
//
// A sample begins with a look at the checkpoint's fields, on the I/O thread:
// whether it is there, and whether it is the one that is kept. Samples that
// come before a look begins share it, and none is needed for a second after
// one, unless this process has changed checkpoints since. While the store does
// not answer, what is kept serves as it was seen last. A sample that wants the
// checkpoint of a certain time is refused if it was overwritten since.
#ifndef WEFT_SRC_ENGINE_SAMPLERS_SAMPLERS_H_
#define WEFT_SRC_ENGINE_SAMPLERS_SAMPLERS_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/observe/metrics.h"
#include "src/base/threads/mutex.h"
#include "src/engine/adapters/adapter_manager.h"
#include "src/engine/engine_context.h"
#include "src/engine/samplers/sampler_table.h"
#include "src/request/checkpoint.h"
#include "src/request/field_names.h"
#include "src/request/reply.h"
#include "src/request/sample.h"

namespace weft::engine {

class Samplers {
 public:
  // The pointers outlive the object and its callbacks.
  Samplers(const EngineContext* context, AdapterManager* manager,
           prometheus::Registry* registry);

  // Does what Engine::Sample does for a request with a checkpoint. Threads:
  // any.
  CancelHandle Sample(SampleRequest request,
                      std::function<void(SampleDelta)> on_delta,
                      Callback<SampleResult> done) ABSL_LOCKS_EXCLUDED(mu_);

  // If the store does not answer, lets samples of what is kept go on without
  // the look for which they wait. Threads: engine thread; call it between two
  // pieces of work.
  void GoOn() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What a sample is from: the name, and SampleRequest::checkpoint_created_at.
  using Wanted = std::pair<SamplerName, absl::Time>;

  // A sample until the dispatcher has it. mu_ guards what follows `hold`.
  struct Waiter {
    const std::string field = NameOfField("checkpoint");  // In errors.
    SampleRequest request;
    std::function<void(SampleDelta)> on_delta;
    Callback<SampleResult> done;
    std::shared_ptr<void> hold;  // A drain waits for the sample.
    bool ended = false;          // `done` has its answer, or the dispatcher.
    bool cancelled = false;
    CancelHandle running;  // Set when the dispatcher has the sample.
  };
  using WaiterPtr = std::shared_ptr<Waiter>;
  using Waiters = std::vector<WaiterPtr>;

  // Any thread may call the methods below.

  // Returns the sampler that is wanted, if it is kept and has not expired.
  std::optional<AdapterKey> Kept(const Wanted& wanted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns the sampler that needs no look, and counts a use of it.
  std::optional<AdapterKey> UseSeen(const Wanted& wanted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Adds to those who wait for the next look, and has it made.
  void WaitForLook(const Wanted& wanted, const Waiters& waiters)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Gives the sample to the dispatcher. REQUIRES: a use of `key` is counted.
  CancelHandle Submit(AdapterKey key, bool before_drain, SampleRequest request,
                      std::function<void(SampleDelta)> on_delta,
                      Callback<SampleResult> done) ABSL_LOCKS_EXCLUDED(mu_);
  void EndUse(AdapterKey key) ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel(const WaiterPtr& waiter) ABSL_LOCKS_EXCLUDED(mu_);
  void Fail(const Waiters& waiters, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Fails the samples with an error of their checkpoint.
  void Refuse(const Waiters& waiters, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Looks at the checkpoint, on the I/O thread.
  void Look(const Wanted& wanted) ABSL_LOCKS_EXCLUDED(mu_);

  // The engine thread calls the methods below.

  // Goes on after a look that gave `info`.
  void Settle(const Wanted& wanted, const Sighting& seen,
              const absl::StatusOr<CheckpointInfo>& info,
              const Waiters& waiters) ABSL_LOCKS_EXCLUDED(mu_);
  // Lets the samples wait for the store, unless the checkpoint is kept.
  void WaitForStore(const Wanted& wanted, const Waiters& waiters)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Gives the dispatcher the samples that were not cancelled. `key` is in the
  // table; it was `made` for them.
  void SubmitAll(AdapterKey key, const Waiters& waiters, bool made = false)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the key of the sampler of `info`, which it makes if needed. Sets
  // `made`. Errors: RESOURCE_EXHAUSTED if samples use all that are kept.
  absl::StatusOr<AdapterKey> Keep(const SamplerName& name, const Sighting& seen,
                                  const CheckpointInfo& info, bool* made)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status MakeRoom(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);
  AdapterKey Make(const SamplerName& name, const std::string& tenant,
                  const Sighting& seen, const CheckpointInfo& info)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Retires the name's sampler, if there is one that was not created at
  // `except`.
  void Retire(const SamplerName& name, absl::Time except)
      ABSL_LOCKS_EXCLUDED(mu_);
  void Show() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const EngineContext& context_;
  AdapterManager& manager_;
  prometheus::Counter& hits_;
  prometheus::Counter& loads_;
  prometheus::Gauge& kept_;
  Mutex mu_;
  SamplerTable table_ ABSL_GUARDED_BY(mu_);
  // Those who wait for a look that has not begun.
  std::map<Wanted, Waiters> looks_ ABSL_GUARDED_BY(mu_);
  // Those who wait for the look that runs now.
  std::pair<Wanted, Waiters> looking_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_SAMPLERS_SAMPLERS_H_
