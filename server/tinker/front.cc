#include "server/tinker/front.h"

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/fields.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// If all results together have more bytes than this, Futures forgets old ones.
// Futures keeps results that a client has fetched, because the client may fetch
// them again.
constexpr int64_t kMaxResultBytes = int64_t{512} << 20;
// The size of the budget Front::waiting.
constexpr int64_t kMaxWaitingBytes = int64_t{512} << 20;

// The memory of an entry of a table besides its text: the entry's fields, its
// place in the table, and what the ledger remembers of it.
constexpr int64_t kEntryBytes = 1024;

// Returns the entry with this id if `owner` owns it, else NOT_FOUND.
template <typename Table>
auto FindOwned(Table& table, const char* what, const std::string& owner,
               const std::string& id)
    -> absl::StatusOr<decltype(&table.begin()->second)> {
  const auto found = table.find(id);
  if (found != table.end() && found->second.owner == owner) {
    return &found->second;
  }
  return absl::NotFoundError(absl::StrCat("no ", what, " ", Quoted(id)));
}

}  // namespace

Front::Front(ServiceCore* core, const std::shared_ptr<HttpServer>& server,
             Futures::After later)
    : port(core, server, InClientsNames),
      ledger(&port),
      futures(kMaxResultBytes, core->memory, later),
      after(std::move(later)),
      waiting(std::make_shared<FairBudget>(kMaxWaitingBytes,
                                           "bytes of waiting requests")) {}

std::vector<std::string> Front::model_names() const {
  std::vector<std::string> names = port.core()->options.model_aliases;
  names.insert(names.begin(), model_name());
  return names;
}

absl::Status Front::CheckOffered(const Json& body) const {
  WEFT_RETURN_IF_ERROR(RefuseFields(body));
  return AsksFor(body, kStabilityInfo) ? CheckStableReinforce()
                                       : absl::OkStatus();
}

absl::Status Front::CheckStableReinforce() const {
  if (port.core()->options.tinker_stable_reinforce) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      kStabilityInfo, " (loss ", kStableReinforce,
      ") is not offered by this server (--no-tinker-stable-reinforce): set "
      "loss_fn to importance_sampling, ppo, cispo or gspo"));
}

absl::StatusOr<Session*> Front::FindSession(const Call& call,
                                            const std::string& id) {
  return FindOwned(sessions, "session", call.owner(), id);
}

absl::StatusOr<Model*> Front::FindModel(const Call& call,
                                        const std::string& id) {
  return FindOwned(models, "model", call.owner(), id);
}

absl::StatusOr<Sampler*> Front::FindSampler(const Call& call,
                                            const std::string& id) {
  return FindOwned(samplers, "sampling session", call.owner(), id);
}

absl::StatusOr<UploadedLoss*> Front::FindLoss(const Call& call,
                                              const std::string& id) {
  return FindOwned(losses, "custom loss", call.owner(), id);
}

absl::StatusOr<std::shared_ptr<void>> Front::ChargeEntry(
    const std::string& owner, size_t text_bytes) const {
  return port.core()->memory->Reserve(
      owner, kEntryBytes + static_cast<int64_t>(text_bytes));
}

std::string Front::SessionOf(const std::string& model) const {
  const auto found = models.find(model);
  return found == models.end() ? "" : found->second.session;
}

Caller Front::CallerOf(const std::string& session) const {
  const auto found = sessions.find(session);
  return found == sessions.end() ? Caller() : found->second.caller;
}

}  // namespace weft::tinker
