// Runs the residency policy with random work, failures and deletions, and
// compares it with a model. The model tracks the adapters' locations, their
// requests for slots and their uses. Memory limits always hold, the right
// adapter moves, and every adapter is served.
#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "src/dispatch/residency.h"
#include "tests/support/adapter_keys.h"

namespace weft::dispatch {
namespace {

using enum AdapterLocation;

struct Model {
  Location location = kDevice;
  std::optional<Move> move;
  Demand demand;
  bool served = false;
  uint64_t last_use = 0;
  int64_t waiting = 0;  // Number of requests.
  uint64_t bytes = 0;
};

class World {
 public:
  World(uint64_t seed, const ResidencyOptions& options)
      : random_(seed), options_(options), residency_(options) {}

  void Run() {
    for (int round = 0; round < 3000; ++round) {
      Disturb();
      Advance();
      if (testing::Test::HasFailure()) return;
    }
    // Without new work, everything is served in the end.
    for (int round = 0; round < 10000 && Outstanding() > 0; ++round) Advance();
    EXPECT_EQ(Outstanding(), 0);
    EXPECT_FALSE(residency_.has_waiters());
  }

 private:
  int Uniform(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random_);
  }

  int64_t Outstanding() const {
    int64_t sum = static_cast<int64_t>(line_.size());
    for (const auto& [name, model] : models_) {
      sum += model.waiting + (model.demand.busy ? 1 : 0);
    }
    return sum;
  }

  void Ask(const std::string& name) {
    line_.push_back(name);
    asked_[name] = uses_;
  }

  // Makes new adapters, work, cancellations and deletions.
  void Disturb() {
    const std::string name = "a" + std::to_string(Uniform(0, 9));
    const auto it = models_.find(name);
    if (it == models_.end()) {
      if (Uniform(0, 3) == 0 && !std::ranges::count(line_, "+" + name)) {
        tickets_[++next_ticket_] = name;
        residency_.WantSlot(next_ticket_);
        Ask("+" + name);
      }
      return;
    }
    Model& model = it->second;
    const int what = Uniform(0, 99);
    if (what < 60) {
      ++model.waiting;
      model.demand.ready = kTraining;
      if (residency_.Want(Key(name))) Ask(name);
    } else if (what < 65) {
      model.waiting = 0;
      model.demand.ready = 0;
    } else if (what < 67 && !model.demand.busy) {
      residency_.Remove(Key(name));
      std::erase(line_, name);
      models_.erase(it);
    }
  }

  // Lets the device begin and end work, ends some moves, and begins new moves.
  void Advance() {
    for (auto& [name, model] : models_) {
      if (model.demand.busy && Uniform(0, 1) == 0) {
        model.demand.busy = false;
        Use(name, model);
      } else if (!model.demand.busy && model.waiting > 0 &&
                 residency_.CanRun(Key(name)) && Uniform(0, 1) == 0) {
        model.demand.ready = --model.waiting > 0 ? kTraining : 0;
        model.demand.busy = true;
      }
    }
    for (auto& [name, model] : models_) {
      if (model.move && Uniform(0, 2) == 0) Finish(name, model);
    }
    const auto demand_of = [this](AdapterKey key) {
      return models_.at(NameOf(key)).demand;
    };
    const auto bytes_of = [this](AdapterKey key) {
      return models_.at(NameOf(key)).bytes;
    };
    for (;;) {
      // An adapter without work leaves the line.
      std::erase_if(line_, [&](const std::string& name) {
        return name[0] != '+' && models_.at(name).demand.ready == 0;
      });
      const std::optional<Move> move = residency_.Next(demand_of, bytes_of);
      if (!move) return;
      Begin(*move);
      CheckLimits();
      if (testing::Test::HasFailure()) return;
    }
  }

  void Use(const std::string& name, Model& model) {
    residency_.Used(Key(name), kTraining);
    model.served = true;
    model.last_use = ++uses_;
  }

  void Finish(const std::string& name, Model& model) {
    const Move move = *std::exchange(model.move, std::nullopt);
    const bool ok = Uniform(0, 19) > 0;
    const std::optional<SlotWaiter> failed = residency_.Finished(move, ok);
    if (ok) {
      EXPECT_FALSE(failed.has_value());
      model.location = move.to;
      if (move.to == kDevice) {
        model.served = false;
        model.last_use = ++uses_;
      }
    } else if (move.to != kDevice && move.from == kDevice) {
      std::erase(line_, name);
    }
    if (!failed) return;
    if (failed->ticket > 0) {
      std::erase(line_, "+" + tickets_.at(failed->ticket));
      return;
    }
    const std::string& unserved = NameOf(failed->adapter);
    std::erase(line_, unserved);
    models_.at(unserved).waiting = 0;
    models_.at(unserved).demand.ready = 0;
  }

  void Begin(const Move& move) {
    if (move.ticket > 0) {
      const std::string name = tickets_.at(move.ticket);
      ExpectFirstInLine("+" + name);
      ExpectRoom(name);
      residency_.Add(Key(name));
      Model& model = models_[name];
      model.bytes = static_cast<uint64_t>(Uniform(5, 15));
      model.last_use = ++uses_;
      return;
    }
    const std::string& name = NameOf(move.adapter);
    Model& model = models_.at(name);
    EXPECT_EQ(move.from, model.location);
    EXPECT_FALSE(model.move.has_value());
    model.move = move;
    if (move.to == kDevice) {
      ExpectFirstInLine(name);
      ExpectRoom(name);
    } else if (move.from == kDevice) {
      ExpectRightVictim(name);
      if (model.demand.ready != 0) Ask(name);
    }
  }

  // Expects that `name` is the first in line, and removes it. Skips other
  // adapters that are leaving.
  void ExpectFirstInLine(const std::string& name) {
    const auto first = std::ranges::find_if(line_, [&](const std::string& n) {
      return n[0] == '+' || n == name || !models_.at(n).move.has_value();
    });
    ASSERT_NE(first, line_.end());
    EXPECT_EQ(*first, name);
    line_.erase(first);
  }

  void ExpectRightVictim(const std::string& name) {
    const Model& victim = models_.at(name);
    EXPECT_FALSE(victim.demand.busy);
    // Adapters that are leaving need no room yet.
    const auto first = std::ranges::find_if(line_, [&](const std::string& n) {
      return n[0] == '+' || !models_.at(n).move.has_value();
    });
    ASSERT_NE(first, line_.end()) << "nobody wants the room";
    const auto leaving = std::ranges::count_if(models_, [](const auto& m) {
      return m.second.location == kDevice && m.second.move.has_value();
    });
    const auto needed = std::ranges::count_if(line_, [&](const std::string& n) {
      return n[0] == '+' || !models_.at(n).move.has_value();
    });
    EXPECT_LE(leaving, needed) << "more leave than can come in";
    const uint64_t asked = asked_.at(*first);
    EXPECT_TRUE(victim.demand.ready == 0 ||
                (victim.served && victim.last_use > asked));
    for (const auto& [other, model] : models_) {
      if (other == name || model.location != kDevice || model.move ||
          model.demand.busy) {
        continue;
      }
      if (model.demand.ready == 0) {
        EXPECT_EQ(victim.demand.ready, 0) << other << " has nothing to do";
        EXPECT_LT(victim.last_use, model.last_use) << other;
      } else if (victim.demand.ready != 0 && model.served &&
                 model.last_use > asked) {
        EXPECT_LT(victim.last_use, model.last_use) << other;
      }
    }
  }

  // Expects that the others on the device leave room for one more.
  void ExpectRoom(const std::string& name) {
    uint64_t held = 0;
    for (const auto& [other, model] : models_) {
      const bool comes = model.move && model.move->to == kDevice;
      if (other != name && (model.location == kDevice || comes)) {
        held += model.bytes;
      }
    }
    EXPECT_TRUE(options_.device_bytes == 0 || held < options_.device_bytes ||
                held == 0);
  }

  void CheckLimits() {
    int slots = 0;
    uint64_t host = 0;
    std::array<int, kNumAdapterLocations> counts{};
    for (const auto& [name, model] : models_) {
      ++counts[static_cast<size_t>(model.location)];
      EXPECT_EQ(residency_.LocationOf(Key(name)), model.location);
      const bool comes = model.move && model.move->to == kDevice;
      if (model.location == kDevice || comes) ++slots;
      const bool goes_to_host = model.move && model.move->to == kHost;
      if (model.location == kHost || goes_to_host) host += model.bytes;
    }
    EXPECT_EQ(residency_.Counts(), counts);
    EXPECT_LE(slots, options_.max_resident);
    EXPECT_LE(host, options_.host_bytes);
  }

  std::mt19937_64 random_;
  const ResidencyOptions options_;
  Residency residency_;
  std::map<std::string, Model> models_;
  std::map<uint64_t, std::string> tickets_;
  // The adapters that asked for a slot. A prefix "+" marks a new adapter.
  std::deque<std::string> line_;
  // The value of uses_ when each adapter asked.
  std::map<std::string, uint64_t> asked_;
  uint64_t next_ticket_ = 0;
  uint64_t uses_ = 0;
};

TEST(RandomResidencyTest, LimitsHoldAndAllAreServed) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    for (const int max_resident : {1, 2, 5}) {
      for (const uint64_t host_bytes : {0, 12, 40}) {
        for (const uint64_t device_bytes : {0, 25}) {
          SCOPED_TRACE(testing::Message()
                       << "seed " << seed << ", slots " << max_resident
                       << ", host bytes " << host_bytes << ", device bytes "
                       << device_bytes);
          World(seed, {.max_resident = max_resident,
                       .host_bytes = host_bytes,
                       .device_bytes = device_bytes})
              .Run();
          if (HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft::dispatch
