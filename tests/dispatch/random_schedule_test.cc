// Random clients of a few tenants use the scheduler. Steps arrive out of order,
// and some are cancelled, expire or fail. Every step must be applied exactly
// once, and no step may move across a barrier. No tenant may queue beyond its
// limits, and no tenant may be refused below its share, or only because its
// steps wait for a step that is missing.
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "src/base/reason.h"
#include "src/dispatch/scheduler.h"
#include "tests/support/adapter_keys.h"
#include "tests/support/sanitizer_slowdown.h"

namespace weft::dispatch {
namespace {

struct Step {
  WorkKind kind = WorkKind::kTrain;
  std::vector<int64_t> datum_tokens;
};

// An adapter with a script of numbered steps. Its client sends the steps in any
// order within a window. It sends a step again if the step was cancelled,
// expired or failed.
struct Client {
  std::string name;
  std::string tenant;
  std::vector<Step> script;               // Step n is script[n - 1].
  std::set<uint64_t> missing;             // Steps that the client must send.
  std::map<uint64_t, int64_t> data_done;  // Number of data done, by step.
  std::set<uint64_t> applied;
};

class ScheduleWorld {
 public:
  ScheduleWorld(uint64_t seed, int num_clients, int num_steps)
      : random_(seed),
        scheduler_({.max_batch_tokens = kBatchTokens,
                    .sampling_share = 0.3,
                    .tenant_weights = {{"tenant0", 4}}}) {
    for (int c = 0; c < num_clients; ++c) {
      Client client;
      client.name = "adapter" + std::to_string(c);
      client.tenant = "tenant" + std::to_string(c % 4);
      scheduler_.AddAdapter(Key(client.name), client.name, client.tenant, 0);
      for (int n = 1; n <= num_steps; ++n) {
        client.script.push_back(RandomStep());
        client.missing.insert(n);
      }
      clients_.push_back(client);
    }
  }

  void Run() {
    for (int round = 0; round < 200000 && !Done(); ++round) {
      now_ += absl::Milliseconds(Uniform(0, 50));
      Send();
      if (Uniform(0, 9) == 0) CancelSomething();
      for (const uint64_t id : scheduler_.Expired(now_)) Withdraw(id);
      Execute();
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_TRUE(Done()) << "work is stuck";
    EXPECT_TRUE(scheduler_.Idle());
    for (const Client& client : clients_) {
      EXPECT_EQ(scheduler_.QueueDepthOf(client.tenant), 0);
      EXPECT_EQ(scheduler_.LastStep(Key(client.name)), client.script.size());
    }
  }

 private:
  static constexpr int64_t kBatchTokens = 100;

  // An accepted request that has not ended.
  struct Accepted {
    size_t client = 0;
    uint64_t step = 0;
  };

  int64_t Uniform(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  Step RandomStep() {
    Step step;
    if (Uniform(0, 4) == 0) {
      step.kind = Uniform(0, 1) == 0 ? WorkKind::kOptim : WorkKind::kAdapterOp;
      return step;
    }
    const int64_t num_data = Uniform(1, 8);
    for (int64_t i = 0; i < num_data; ++i) {
      step.datum_tokens.push_back(Uniform(1, Uniform(0, 9) == 0 ? 150 : 40));
    }
    return step;
  }

  bool Done() const {
    return std::all_of(clients_.begin(), clients_.end(), [](const Client& c) {
      return c.applied.size() == c.script.size();
    });
  }

  void Send() {
    for (size_t c = 0; c < clients_.size(); ++c) {
      Client& client = clients_[c];
      if (client.missing.empty() || Uniform(0, 2) == 0) continue;
      auto it = client.missing.begin();
      std::advance(it,
                   Uniform(0, std::min<int64_t>(4, client.missing.size() - 1)));
      WorkItem item;
      item.id = ++last_id_;
      item.adapter = Key(client.name);
      item.step = *it;
      item.kind = client.script[*it - 1].kind;
      item.backward = item.kind == WorkKind::kTrain;
      item.datum_tokens = client.script[*it - 1].datum_tokens;
      if (Uniform(0, 3) == 0) {
        item.deadline = now_ + absl::Milliseconds(Uniform(1, 400));
      }
      if (scheduler_.Enqueue(item, now_).ok()) {
        accepted_[item.id] = {.client = c, .step = *it};
        client.missing.erase(it);
      }
    }
  }

  void CancelSomething() {
    if (accepted_.empty()) return;
    auto it = accepted_.begin();
    std::advance(it, Uniform(0, accepted_.size() - 1));
    const uint64_t id = it->first;
    Withdraw(id);
  }

  void Withdraw(uint64_t id) {
    if (!scheduler_.Remove(id)) {
      (void)scheduler_.Empty(id);  // It ends in its turn, if it is accepted.
      return;
    }
    const Accepted& work = accepted_.at(id);
    clients_[work.client].missing.insert(work.step);
    clients_[work.client].data_done.erase(work.step);
    accepted_.erase(id);
  }

  void Execute() {
    const Plan plan = scheduler_.Next(now_, Uniform(0, 1));
    scheduler_.AccountDeviceTime(plan.kind, absl::Milliseconds(Uniform(1, 30)));
    if (plan.kind == Plan::Kind::kExclusive) {
      CheckOrder(plan.work_id, /*barrier=*/true);
      Complete(plan.work_id, /*last=*/true);
    }
    if (plan.kind != Plan::Kind::kTrain) return;
    CheckShape(plan);
    for (const TrainSlice& slice : plan.slices) {
      CheckOrder(slice.work_id, /*barrier=*/false);
    }
    std::vector<TrainSlice> slices = plan.slices;
    std::shuffle(slices.begin(), slices.end(), random_);
    for (const TrainSlice& slice : slices) {
      const Accepted& work = accepted_.at(slice.work_id);
      int64_t& done = clients_[work.client].data_done[work.step];
      EXPECT_EQ(done, slice.first_datum) << "data lost or repeated";
      done += slice.num_data;
      Complete(slice.work_id, slice.last);
    }
  }

  // Checks that the last barrier before the step, and all steps before that
  // barrier, have been applied. If the step itself is a barrier, checks all
  // earlier steps.
  void CheckOrder(uint64_t id, bool barrier) {
    const Accepted& work = accepted_.at(id);
    const uint64_t step = work.step;
    const Client& client = clients_[work.client];
    EXPECT_FALSE(client.applied.contains(step)) << "applied twice";
    bool across_barrier = barrier;
    for (uint64_t earlier = step - 1; earlier >= 1; --earlier) {
      across_barrier |= client.script[earlier - 1].kind != WorkKind::kTrain;
      if (across_barrier) {
        ASSERT_TRUE(client.applied.contains(earlier))
            << client.name << ": step " << step << " before " << earlier;
      }
    }
  }

  void CheckShape(const Plan& plan) {
    int64_t tokens = 0;
    int64_t num_data = 0;
    std::map<std::string, std::pair<int, int>> whole_and_parts;
    std::vector<std::string> names;
    for (const TrainSlice& slice : plan.slices) {
      const Accepted& work = accepted_.at(slice.work_id);
      const Client& client = clients_[work.client];
      const std::vector<int64_t>& data =
          client.script[work.step - 1].datum_tokens;
      for (int64_t i = 0; i < slice.num_data; ++i) {
        tokens += data.at(slice.first_datum + i);
      }
      num_data += slice.num_data;
      const bool whole = slice.first_datum == 0 && slice.last;
      auto& [wholes, parts] = whole_and_parts[client.name];
      ++(whole ? wholes : parts);
      if (names.empty() || names.back() != client.name) {
        names.push_back(client.name);
      }
    }
    EXPECT_TRUE(tokens <= kBatchTokens || num_data == 1) << tokens;
    EXPECT_EQ(names.size(), whole_and_parts.size()) << "not neighbours";
    for (const auto& [name, counts] : whole_and_parts) {
      EXPECT_TRUE(counts.second == 0 ||
                  (counts.second == 1 && counts.first == 0));
    }
  }

  void Complete(uint64_t id, bool last) {
    const Accepted work = accepted_.at(id);
    const bool ok = Uniform(0, 7) != 0;
    scheduler_.Finished(id, ok);
    if (!ok || last) {
      EXPECT_TRUE(clients_[work.client].applied.insert(work.step).second);
      accepted_.erase(id);
    }
  }

  std::mt19937_64 random_;
  Scheduler scheduler_;
  absl::Time now_ = absl::UnixEpoch();
  uint64_t last_id_ = 0;
  std::vector<Client> clients_;
  std::map<uint64_t, Accepted> accepted_;
};

TEST(RandomScheduleTest, AppliesEveryStepOnceAndInOrder) {
  for (uint64_t seed = 1; seed <= 30 / kSanitizerSlowdown; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    ScheduleWorld(seed, /*num_clients=*/1 + static_cast<int>(seed % 6),
                  /*num_steps=*/60)
        .Run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace weft::dispatch
