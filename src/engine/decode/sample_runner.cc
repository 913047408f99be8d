#include "src/engine/decode/sample_runner.h"

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "src/engine/adapters/adapter_table.h"

namespace weft::engine {

void SampleRunner::Admit() {
  dispatch::SampleDesk& desk = context_.dispatcher.samples();
  std::set<std::string> full;  // Tenants whose next sample has no room.
  while (const std::optional<dispatch::SampleTask> sample = desk.Take(full)) {
    const SampleRequest& request = *sample->request;
    if (!loop_.HasRoom(request, sample->tenant)) {
      desk.PutBack(*sample);
      full.insert(sample->tenant);
      continue;
    }
    lora::AdapterVersionPtr version;
    if (sample->adapter != AdapterKey::kBaseModel) {
      absl::StatusOr<lora::AdapterVersionPtr> found =
          context_.adapters.Version(sample->adapter, request.snapshot);
      if (!found.ok()) {
        desk.Finish(sample->id, found.status());
        continue;
      }
      version = *std::move(found);
    }
    loop_.Admit(*sample, std::move(version));
    desk.Start(*sample);
  }
}

void SampleRunner::Decode() {
  Admit();
  dispatch::SampleDesk& desk = context_.dispatcher.samples();
  std::vector<SampleEvent> events;
  const absl::Status status =
      context_.guard.Compute("Sample", [&] { events = loop_.Step(); });
  if (!status.ok()) {
    for (const uint64_t id : loop_.CancelAll()) desk.Finish(id, status);
    return;
  }
  for (SampleEvent& event : events) {
    desk.Deliver(event.work_id, std::move(event.deltas));
    // Before the reply, after which the client may train on the samples.
    if (event.record) context_.sample_records.Put(*event.record);
    if (event.finished) desk.Finish(event.work_id, std::move(event.result));
  }
}

void SampleRunner::End(const std::vector<uint64_t>& ids,
                       const absl::Status& status) {
  for (const uint64_t id : ids) {
    if (loop_.Cancel(id)) context_.dispatcher.samples().Finish(id, status);
  }
}

}  // namespace weft::engine
