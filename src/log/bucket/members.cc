#include "src/log/bucket/members.h"

#include <algorithm>

#include "absl/status/statusor.h"
#include "src/base/clock.h"
#include "src/log/bucket/log_keys.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/standby.h"

namespace weft::log {
namespace {

// An owner tells its figure this often, too.
constexpr absl::Duration kLookAgain = kBeatInterval;
// A process looks at this many others at most.
constexpr int kMostOthers = 16;

}  // namespace

void MemberChoice::See(const std::string& key, const Member& member,
                       absl::Time now) {
  Seen& seen = seen_[key];
  if (seen.member.etag != member.etag) {
    seen.member = member;
    seen.since = now;
    seen.sent_before = 0;
  }
  seen.looked = now;
  seen.sent_before += std::exchange(seen.sent, 0);
}

void MemberChoice::SeeOwn(std::optional<uint64_t> own) {
  own_.member.queued_tokens = own;
  own_.sent_before = std::exchange(own_.sent, 0);
}

bool MemberChoice::Seen::MaySample(const std::string& self) const {
  return member.queued_tokens && !member.address.empty() &&
         member.address != self && looked - since < kOwnerPatience;
}

std::string MemberChoice::Choose(const std::string& self,
                                 std::optional<uint64_t> own, uint64_t tokens,
                                 double lot) {
  std::vector<std::pair<Seen*, double>> shares;
  double sum = 0;
  const auto add = [&](Seen* seen, uint64_t queued) {
    const auto size = static_cast<double>(queued + kBatch * tokens);
    shares.emplace_back(seen, 1 / (size * size));
    sum += shares.back().second;
  };
  for (auto& [key, seen] : seen_) {
    if (seen.MaySample(self)) add(&seen, seen.tokens());
  }
  if (own || shares.empty()) {
    add(&own_, std::max(own.value_or(0), own_.tokens()));
  }
  double left = lot * sum;
  Seen* chosen = shares.back().first;
  for (const auto& [seen, share] : shares) {
    left -= share;
    if (left >= 0) continue;
    chosen = seen;
    break;
  }
  chosen->sent += tokens;
  return chosen == &own_ ? "" : chosen->member.address;
}

Members::Members(store::ObjectStore* store, int own, int num_logs,
                 std::string self, const SampleLoad* load,
                 prometheus::Registry* registry)
    : store_(*store),
      own_(own),
      num_logs_(num_logs),
      self_(std::move(self)),
      load_(*load),
      sent_(AddCounter(registry, "weft_samples_sent_on_total",
                       "Samples from checkpoints for which this process has "
                       "named another one to its edge.")) {}

std::string Members::Choose() {
  bool look = false;
  std::string chosen;
  {
    MutexLock lock(&mu_);
    look = !looking_ && SteadyNow() >= next_look_ && num_logs_ > 1;
    if (look) looking_ = true;
    chosen = choice_.Choose(self_, load_.queued_tokens(), load_.tokens_of_one(),
                            std::uniform_real_distribution<>()(lots_));
  }
  if (look) looks_.Post([this] { Look(); });
  if (!chosen.empty()) sent_.Increment();
  return chosen;
}

void Members::Look() {
  for (int i = 1; i <= std::min(num_logs_ - 1, kMostOthers); ++i) {
    const LogKeys keys = {.log = (own_ + i) % num_logs_};
    const absl::StatusOr<SeenManifest> seen = LookAtManifest(store_, keys);
    // At an end that may not wait, and if none would answer, the rest is left.
    if (stopped_ || store::IsAway(seen.status())) break;
    if (!seen.ok()) continue;
    MutexLock lock(&mu_);
    choice_.See(keys.Manifest(),
                {.etag = seen->etag,
                 .address = seen->manifest.owner.address,
                 .queued_tokens = seen->manifest.queued_tokens},
                SteadyNow());
  }
  MutexLock lock(&mu_);
  choice_.SeeOwn(load_.queued_tokens());
  looking_ = false;
  next_look_ = SteadyNow() + kLookAgain;
}

}  // namespace weft::log
