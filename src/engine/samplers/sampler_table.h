// The checkpoints that are kept for sampling: which ones samples use, and which
// one leaves when another needs its place.
//
// A checkpoint that was overwritten or deleted is retired: no more samples find
// it, and it goes when those that use it have ended. Others stay until their
// place is needed. Then the longest unused one goes of the tenant that has the
// most bytes, but of another tenant only if that has more than the one who
// needs the place.
// Threads: not thread-safe.
#ifndef WEFT_SRC_ENGINE_SAMPLERS_SAMPLER_TABLE_H_
#define WEFT_SRC_ENGINE_SAMPLERS_SAMPLER_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "src/base/fair_eviction.h"
#include "src/request/adapter_key.h"

namespace weft::engine {

// An adapter's id and a checkpoint's name.
using SamplerName = std::pair<std::string, std::string>;

// When a checkpoint was seen as it is kept.
struct Sighting {
  absl::Time at = absl::InfinitePast();  // SteadyNow().
  uint64_t changes = 0;                  // AdapterIo::changes().
};

struct Sampler {
  SamplerName name;
  absl::Time created_at;
  absl::Time expires_at = absl::InfiniteFuture();
  Sighting seen = {};
};

class SamplerTable {
 public:
  explicit SamplerTable(int max) : max_(static_cast<size_t>(max)) {}

  // Adds a sampler, which nobody uses, as the current one of its name.
  // REQUIRES: the name has no current one; not full().
  void Add(AdapterKey key, const std::string& tenant, int64_t bytes,
           Sampler sampler);
  // Returns the key of the name's sampler that is not retired, if there is one.
  std::optional<AdapterKey> Find(const SamplerName& name) const;
  // REQUIRES, of these: the table has the sampler.
  Sampler& At(AdapterKey key) { return entries_.at(key).sampler; }
  // Counts one more sample that uses the sampler.
  void Begin(AdapterKey key);
  // Counts one less. Returns true if the sampler was retired and this was its
  // last: then it is no longer in the table.
  bool End(AdapterKey key);
  // Retires a sampler. Returns true if no sample uses it: then it is no longer
  // in the table.
  bool Retire(AdapterKey key);

  bool full() const { return entries_.size() >= max_; }
  size_t size() const { return entries_.size(); }
  // Removes the sampler that leaves for one of `tenant`, and returns its key.
  // Returns none if there is no such sampler.
  std::optional<AdapterKey> Evict(const std::string& tenant);

 private:
  struct Entry {
    Sampler sampler;
    int uses = 0;
    bool retired = false;
    FairEviction<AdapterKey>::Place place;
  };

  using Account = FairEviction<AdapterKey>::Account;

  // Returns none if samples use all.
  std::optional<AdapterKey> LongestUnused(const Account& account) const;
  void Erase(AdapterKey key);

  const size_t max_;
  std::map<AdapterKey, Entry> entries_;
  std::map<SamplerName, AdapterKey> current_;
  FairEviction<AdapterKey> order_;  // The longest unused first.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_SAMPLERS_SAMPLER_TABLE_H_
