// Runs the ledger's steps again after a restart (steps.h).
#include <memory>
#include <utility>

#include "server/tinker/step_order.h"
#include "server/tinker/steps.h"
#include "src/base/log.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

// The pause before the next try if a step is refused, or if an adapter is not
// restored yet.
constexpr absl::Duration kPause = absl::Milliseconds(200);

// Sets Model::made, and line.next to the number of the adapter's next step.
// Returns false if the adapter is not restored yet.
bool PlaceLine(Front& front, Model& model) {
  v1::GetAdapterRequest request;
  request.set_adapter_id(model.adapter);
  const absl::Status asked = front.port.Call<AdapterInfo>(
      {.caller = model.caller}, Rpc::kGetAdapter, request,
      [](Engine& engine, std::string id, auto then) {
        engine.GetAdapter(std::move(id), std::move(then));
      },
      [&front, id = model.id](const absl::StatusOr<AdapterInfo>& info) {
        const auto found = front.models.find(id);
        if (!info.ok() || found == front.models.end()) return;
        found->second.made = true;
        found->second.line.next = static_cast<int64_t>(info->next_step);
      });
  // If the process ended before the adapter was made, there is no adapter, and
  // line.next stays 1.
  if (asked.ok() || absl::IsNotFound(asked)) return true;
  if (absl::IsUnavailable(asked)) return false;
  Log(LogLevel::kWarning, "a model's place is not known",
      {{"model", model.id}, {"error", std::string(asked.message())}});
  return true;
}

// Reads and runs the requests of the ledger's steps, one after the other.
class Restore : public std::enable_shared_from_this<Restore> {
 public:
  Restore(Front& front, std::function<absl::Status(const CallPtr&)> run)
      : front_(front), run_(std::move(run)) {}

  void Start() {
    front_.ledger->ListSteps(
        [self = shared_from_this()](std::vector<StepFile> files) {
          self->files_ = std::move(files);
          self->Next();
        });
  }

 private:
  void Next() {
    if (next_ == files_.size()) {
      front_.ready = true;
      return;
    }
    front_.ledger->ReadStep(
        files_[next_++],
        [self = shared_from_this()](std::optional<LedgerEntry> entry) {
          entry ? self->Take(*std::move(entry)) : self->Next();
        });
  }

  void Take(LedgerEntry entry) {
    if (!front_.models.contains(entry.fields.value("model", ""))) {
      front_.ledger->Erase(EntryKind::kStep, entry.id);
      return Next();
    }
    const auto call = std::make_shared<Call>();
    call->http.method = "POST";
    call->http.target = entry.fields.value("target", "");
    call->http.content_type = entry.fields.value("content_type", "");
    call->http.body = std::move(entry.bytes);
    call->caller = CallerFromJson(entry.fields["caller"]);
    call->kept = true;
    Run(call);
  }

  void Run(const CallPtr& call) {
    if (run_(call).ok()) return Next();
    front_.after(kPause,
                 [self = shared_from_this(), call] { self->Run(call); });
  }

  Front& front_;
  const std::function<absl::Status(const CallPtr&)> run_;
  std::vector<StepFile> files_;
  size_t next_ = 0;
};

}  // namespace

void RestoreSteps(Front& front,
                  std::function<absl::Status(const CallPtr&)> run) {
  for (auto& [id, model] : front.models) {
    if (PlaceLine(front, model)) continue;
    front.after(kPause, [&front, run = std::move(run)]() mutable {
      RestoreSteps(front, std::move(run));
    });
    return;
  }
  std::make_shared<Restore>(front, std::move(run))->Start();
}

}  // namespace weft::tinker
