#include "server/tinker/custom_losses.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/errors.h"
#include "server/tinker/steps.h"
#include "src/base/status_macros.h"
#include "src/request/loss_graph.h"

namespace weft::tinker {
namespace {

// Reads the loss of a request, and returns it serialized.
absl::StatusOr<std::string> ReadLoss(const Json& body) {
  CustomLoss loss;
  const Json* const inputs = Find(body, "inputs");
  if (inputs == nullptr || !inputs->is_array()) {
    return BadField("inputs", "must be a list");
  }
  v1::CustomLoss out;
  for (const Json& input : *inputs) {
    if (!input.is_object()) return BadField("inputs", "must have objects");
    WEFT_ASSIGN_OR_RETURN(const std::string name, StringField(input, "name"));
    WEFT_ASSIGN_OR_RETURN(const int64_t rank, IntField(input, "rank"));
    if (rank < 0 || rank > 2) {
      return BadField("inputs.rank",
                      absl::StrCat("is ", rank, ", must be in [0, 2]"));
    }
    loss.inputs.push_back({.name = name, .rank = static_cast<int>(rank)});
    v1::CustomLossInput* const to = out.add_inputs();
    to->set_name(name);
    to->set_rank(static_cast<uint32_t>(rank));
  }
  WEFT_ASSIGN_OR_RETURN(const Json* const graph, ObjectField(body, "graph"));
  loss.graph = graph->dump();
  const absl::Status read = ReadLossGraph(loss).status();
  if (!read.ok()) return InClientsNames(read);
  out.set_graph(std::move(loss.graph));
  return out.SerializeAsString();
}

absl::Status CheckRoom(const Front& front, const std::string& session) {
  const auto count = std::ranges::count_if(
      front.losses,
      [&](const auto& entry) { return entry.second.session == session; });
  if (count < static_cast<int64_t>(kMaxLosses)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the session has ", count,
                   " custom losses, as many as it may: use one of them again, "
                   "with inputs in place of constants"));
}

// Handles the end of the write of a loss: keeps or forgets the loss, and gives
// `result` or the error to those who wait.
void EndWrite(Front& front, const std::string& id,
              const decltype(UploadedLoss::waiting)& waiting,
              const FutureResult& result, const absl::Status& put) {
  const auto found = front.losses.find(id);
  // The session may have ended meanwhile.
  if (found != front.losses.end() && found->second.waiting == waiting) {
    put.ok() ? found->second.waiting.reset()
             : static_cast<void>(front.losses.erase(found));
  }
  for (const auto& done : std::exchange(*waiting, {})) {
    put.ok() ? done(result) : done(put);
  }
}

// Adds the loss, writes it to the ledger, and then gives `done` its id.
absl::Status Keep(Front& front, const std::string& id, UploadedLoss loss,
                  const Callback<FutureResult>& done) {
  const FutureResult result =
      FutureResult::Of({{"type", "create_custom_loss"}, {"loss_id", id}});
  const auto found = front.losses.find(id);
  if (found != front.losses.end()) {
    if (found->second.loss != loss.loss) {
      return absl::AlreadyExistsError(
          absl::StrCat("custom_loss_seq_id of ", id, " has another loss"));
    }
    if (found->second.waiting != nullptr) {
      found->second.waiting->push_back(done);
    } else {
      done(result);
    }
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(CheckRoom(front, loss.session));
  WEFT_ASSIGN_OR_RETURN(loss.charge,
                        front.ChargeEntry(loss.owner, loss.loss.size()));
  const LedgerEntry entry = {
      .id = id, .fields = {{"session", loss.session}}, .bytes = loss.loss};
  const auto waiting =
      std::make_shared<std::vector<Callback<FutureResult>>>(1, done);
  loss.waiting = waiting;
  front.losses.emplace(id, std::move(loss));
  front.ledger.Put(EntryKind::kLoss, entry,
                   [&front, id, waiting, result](const absl::Status& put) {
                     EndWrite(front, id, waiting, result, put);
                   });
  return absl::OkStatus();
}

}  // namespace

absl::Status CreateCustomLoss(Front& front, const CallPtr& call,
                              const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string session,
                        StringField(call->body, "session_id"));
  WEFT_RETURN_IF_ERROR(front.FindSession(*call, session).status());
  WEFT_ASSIGN_OR_RETURN(const int64_t number,
                        IntField(call->body, "custom_loss_seq_id"));
  const std::string name = absl::StrCat("loss-", number);
  return Promise(
      front, call, {.model = session, .seq = std::nullopt, .name = name},
      [&front, call, session,
       name](const Callback<FutureResult>& done) -> absl::Status {
        WEFT_ASSIGN_OR_RETURN(std::string loss, ReadLoss(call->body));
        return Keep(front, absl::StrCat(session, ":", name),
                    {.owner = call->owner(),
                     .session = session,
                     .loss = std::move(loss)},
                    done);
      },
      respond);
}

absl::Status SetCustomLoss(Front& front, const Call& call,
                           const std::string& id,
                           v1::ForwardBackwardRequest* step) {
  WEFT_ASSIGN_OR_RETURN(const UploadedLoss* const uploaded,
                        front.FindLoss(call, id));
  v1::CustomLoss* const loss = step->mutable_loss()->mutable_custom_loss();
  if (!loss->ParseFromString(uploaded->loss)) {
    return absl::DataLossError(absl::StrCat("custom loss ", id, " is damaged"));
  }
  std::set<std::string> unread;
  for (v1::Datum& datum : *step->mutable_data()) {
    auto& inputs = *datum.mutable_custom_inputs();
    unread.clear();
    for (const auto& [name, value] : inputs) unread.insert(name);
    // The first input is the log-probabilities of the step itself. Data of RL
    // have a tensor of the same name, which the loss does not read.
    for (int i = 1; i < loss->inputs_size(); ++i) {
      const v1::CustomLossInput& input = loss->inputs(i);
      if (unread.erase(input.name()) == 0 || input.rank() != 1) continue;
      // The SDK sends no shape for a tensor that has one dimension by default.
      v1::CustomInput& value = inputs[input.name()];
      if (value.shape_size() > 0) continue;
      value.add_shape(
          static_cast<uint32_t>(value.floats_le().size() / sizeof(float) +
                                value.ints_le().size() / sizeof(int64_t)));
    }
    for (const std::string& name : unread) inputs.erase(name);
  }
  return absl::OkStatus();
}

void DropLossesOf(Front& front, const std::string& session) {
  std::vector<std::string> gone;
  for (const auto& [id, loss] : front.losses) {
    if (loss.session == session) gone.push_back(id);
  }
  for (const std::string& id : gone) {
    front.ledger.Erase(EntryKind::kLoss, id);
    front.losses.erase(id);
  }
}

void RestoreLosses(Front& front) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kLoss)) {
    UploadedLoss loss{.session = entry.fields.value("session", ""),
                      .loss = std::move(entry.bytes)};
    if (!front.sessions.contains(loss.session)) {
      front.ledger.Erase(EntryKind::kLoss, entry.id);
      continue;
    }
    loss.owner = OwnerKey(front.CallerOf(loss.session));
    loss.charge =
        front.ChargeEntry(loss.owner, loss.loss.size()).value_or(nullptr);
    front.losses.emplace(entry.id, std::move(loss));
  }
}

}  // namespace weft::tinker
