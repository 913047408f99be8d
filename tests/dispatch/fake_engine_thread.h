// A dispatcher with a clock that stands still and with replies that are
// collected. The test plays the engine thread.
#ifndef WEFT_TESTS_DISPATCH_FAKE_ENGINE_THREAD_H_
#define WEFT_TESTS_DISPATCH_FAKE_ENGINE_THREAD_H_

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/registry.h"
#include "src/dispatch/dispatcher.h"
#include "tests/support/fake_clock.h"
#include "tests/support/filled_options.h"

namespace weft::dispatch {

inline TrainRequest OneDatum(const std::string& adapter, uint64_t step,
                             int32_t payload = 0) {
  TrainRequest request;
  request.adapter_id = adapter;
  request.step = step;
  request.data = {Datum{.tokens = {payload}, .targets = {payload}}};
  return request;
}

inline WorkItem TrainItem() {
  return {.kind = WorkKind::kTrain, .backward = true, .datum_tokens = {10}};
}

class FakeEngineThread {
 public:
  explicit FakeEngineThread(const Options& options)
      : metrics_(&registry_),
        dispatcher_(Filled(options), {.clock = &clock_,
                                      .post_reply =
                                          [this](std::function<void()> task) {
                                            replies_.push_back(std::move(task));
                                          },
                                      .metrics = &metrics_}) {}

  Dispatcher& dispatcher() { return dispatcher_; }
  FakeClock& clock() { return clock_; }
  prometheus::Registry& registry() { return registry_; }

  // Runs tasks until the next work is not RunTasks, and returns this work.
  std::optional<Work> Next(int active_samples = 0) {
    for (;;) {
      std::optional<Work> work =
          dispatcher_.Next(active_samples, absl::ZeroDuration());
      if (!work || !std::holds_alternative<RunTasks>(*work)) return work;
      for (const EngineTask& task : std::get<RunTasks>(*work).tasks) {
        task(absl::OkStatus());
      }
    }
  }

  // Runs the callbacks of all requests that have ended.
  void RunReplies() {
    while (!replies_.empty()) {
      const std::function<void()> task = std::move(replies_.front());
      replies_.pop_front();
      task();
    }
  }

  // Creates an adapter of ten bytes, as RPC CreateAdapter would. `done` runs
  // when there is a slot, or with an error.
  void Create(const std::string& id, const std::string& tenant,
              Callback<AdapterKey> done, uint64_t last_step = 0,
              Durability durability = Durability::kStep) {
    dispatcher_.Post([this, id, tenant, done, last_step,
                      durability](const absl::Status& open) {
      if (!open.ok()) {
        done(open);
        return;
      }
      dispatcher_.adapters().WhenSlotFor(
          id, tenant,
          [this, id, tenant, done, last_step, durability](absl::Status room) {
            AdapterDesk& desk = dispatcher_.adapters();
            if (!room.ok()) {
              done(room);
              return;
            }
            room = desk.CheckNew(id, tenant);
            if (!room.ok()) {
              desk.ReturnSlot();
              done(room);
              return;
            }
            const AdapterKey key = desk.NewKey();
            desk.Add(key, id, tenant, last_step,
                     {.info = {.durability = durability, .resident_bytes = 10},
                      .image_bytes = 10});
            done(key);
          });
    });
  }

  // Sends a step of one datum.
  void Train(const std::string& id, uint64_t step) {
    (void)dispatcher_.steps().Submit(
        OneDatum(id, step), TrainItem(),
        [](const absl::StatusOr<StepResultPtr>&, bool) {});
  }

  // Runs the first step of each adapter, in a batch that takes a second.
  void TrainTogether(const std::vector<std::string>& ids) {
    for (const std::string& id : ids) Train(id, 1);
    const std::optional<Work> work = Next();
    clock_.Advance(absl::Seconds(1));
    for (const auto& [slice, step] : std::get<RunTrain>(*work).slices) {
      dispatcher_.steps().Complete(step.id, TrainResult());
    }
  }

  // Ends a move at once, in place of the owner of the tensors.
  void Finish(const Move& move, const absl::Status& status) {
    AdapterDesk& desk = dispatcher_.adapters();
    if (desk.IsUnderway(move) && status.ok()) {
      desk.Publish(move.adapter,
                   {.info = {.location = move.to}, .image_bytes = 10});
    }
    desk.FinishMove(move, 10, status);
  }

 private:
  FakeClock clock_;
  prometheus::Registry registry_;
  DispatchMetrics metrics_;
  std::deque<std::function<void()>> replies_;
  Dispatcher dispatcher_;
};

}  // namespace weft::dispatch

#endif  // WEFT_TESTS_DISPATCH_FAKE_ENGINE_THREAD_H_
