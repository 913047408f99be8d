#include "src/sampling/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/cpu/kernels.h"

namespace weft::sampling {
namespace {

constexpr int kRounds = 10;
constexpr uint32_t kMultiplier0 = 0xD2511F53;
constexpr uint32_t kMultiplier1 = 0xCD9E8D57;
// Increments of the key: the fractional parts of the golden ratio and of
// sqrt(3), times 2^32.
constexpr uint32_t kWeyl0 = 0x9E3779B9;
constexpr uint32_t kWeyl1 = 0xBB67AE85;

// A draw without filters first finds a block of this many tokens, and then the
// token in the block. A block is short enough for a sum in f32.
constexpr size_t kBlock = 512;
// With top_p or min_p and no top_k, the first attempt takes this many of the
// likeliest tokens. Later attempts take more.
constexpr size_t kFirstCandidates = 256;

// softmax(logits / temperature) as weights. The likeliest token has weight 1.
struct Distribution {
  absl::Span<const float> logits;
  float max_logit = 0;
  float temperature = 1;
  float inverse_temperature = 1;
  // Set if the logits are only a part of the row: the log of the sum of the
  // weights of the whole row.
  std::optional<double> log_total = std::nullopt;

  double LogWeight(size_t token) const {
    return (static_cast<double>(logits[token]) - max_logit) *
           inverse_temperature;
  }
  double Weight(size_t token) const { return std::exp(LogWeight(token)); }
};

using BlockWeights = std::array<float, kBlock>;

// Computes the weights of the tokens [begin, end), at most kBlock, and returns
// their sum.
double FillWeights(const Distribution& distribution, size_t begin, size_t end,
                   BlockWeights& weights) {
  return kernels::cpu::Kernels().weigh_block(
      distribution.logits.data() + begin, static_cast<int64_t>(end - begin),
      distribution.max_logit, distribution.inverse_temperature, weights.data());
}

double TotalWeight(const Distribution& distribution) {
  const size_t vocab = distribution.logits.size();
  BlockWeights weights;
  double total = 0;
  for (size_t begin = 0; begin < vocab; begin += kBlock) {
    total += FillWeights(distribution, begin, std::min(begin + kBlock, vocab),
                         weights);
  }
  return total;
}

// The largest logit, and the start of the first block that contains it.
struct Best {
  float logit = -std::numeric_limits<float>::infinity();
  size_t block = 0;
};

Best FindBest(absl::Span<const float> logits) {
  Best best;
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const float max = kernels::cpu::Kernels().max_block(
        logits.data() + begin,
        static_cast<int64_t>(std::min(kBlock, logits.size() - begin)));
    if (max > best.logit) best = {.logit = max, .block = begin};
  }
  return best;
}

size_t DrawUnfiltered(const Distribution& distribution, double total,
                      float uniform) {
  const size_t vocab = distribution.logits.size();
  BlockWeights weights;
  double rest = uniform * total;
  size_t last = 0;
  // `rest` is less than `total` by at least total * 2^-24. The rounding error
  // of the sums in f64 is far smaller. So some block contains the draw.
  for (size_t begin = 0; begin < vocab; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, vocab);
    const double sum = FillWeights(distribution, begin, end, weights);
    if (rest >= sum) {
      rest -= sum;
      continue;
    }
    for (size_t i = begin; i < end; ++i) {
      const double weight = weights[i - begin];
      if (weight == 0) continue;
      last = i;
      if (rest < weight) break;
      rest -= weight;
    }
    // If rounding carries the search past the block's last token of positive
    // weight, that token is drawn.
    return last;
  }
  return last;
}

// Returns the ids of the `count` likeliest tokens, sorted by logit, highest
// first, and on a tie by id, lowest first.
std::vector<int32_t> LikeliestTokens(absl::Span<const float> logits,
                                     size_t count) {
  const auto is_likelier = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  // The top of the heap is the least likely of the best `count` tokens so far.
  std::vector<int32_t> best;
  best.reserve(count);
  for (size_t i = 0; i < logits.size(); ++i) {
    const int32_t token = static_cast<int32_t>(i);
    if (best.size() < count) {
      best.push_back(token);
      std::push_heap(best.begin(), best.end(), is_likelier);
    } else if (logits[i] > logits[best.front()]) {
      std::pop_heap(best.begin(), best.end(), is_likelier);
      best.back() = token;
      std::push_heap(best.begin(), best.end(), is_likelier);
    }
  }
  std::sort_heap(best.begin(), best.end(), is_likelier);
  return best;
}

double WeightOf(const Distribution& distribution,
                const std::vector<int32_t>& tokens) {
  double sum = 0;
  for (const int32_t token : tokens) sum += distribution.Weight(token);
  return sum;
}

bool IsFiltered(const DrawConfig& config) {
  return config.temperature > 0 &&
         (config.top_k > 0 || config.top_p < 1 || config.min_p > 0);
}

// Returns the distribution of logits whose maximum is `max_logit`.
Distribution DistributionOf(absl::Span<const float> logits, float max_logit,
                            double temperature) {
  Distribution distribution{.logits = logits, .max_logit = max_logit};
  if (temperature > 0) {
    // This limit prevents 0 * infinity, which is NaN, at a tiny temperature.
    distribution.temperature = static_cast<float>(std::max(temperature, 1e-30));
    distribution.inverse_temperature = 1 / distribution.temperature;
  }
  return distribution;
}

// Returns the tokens that the filters keep, the likeliest first. `total` is the
// weight of all tokens; it does not matter if top_k leaves some out.
std::vector<int32_t> FilteredTokens(const Distribution& distribution,
                                    const DrawConfig& config, double total) {
  const size_t vocab = distribution.logits.size();
  // A row has more tokens than a list of it.
  const bool has_top_k =
      config.top_k > 0 && (distribution.log_total.has_value() ||
                           static_cast<size_t>(config.top_k) < vocab);
  size_t count = has_top_k ? static_cast<size_t>(config.top_k)
                           : std::min(kFirstCandidates, vocab);
  std::vector<int32_t> tokens = LikeliestTokens(distribution.logits, count);
  double kept = WeightOf(distribution, tokens);
  if (has_top_k) total = kept;
  const double wanted = config.top_p < 1
                            ? config.top_p * total
                            : std::numeric_limits<double>::infinity();
  const double least = std::log(config.min_p);  // -inf for 0.
  // A top_k has all its candidates. min_p needs no more of them once one is not
  // likely enough.
  while (!has_top_k && kept < wanted && count < vocab &&
         distribution.LogWeight(tokens.back()) >= least) {
    // If more than vocab / 16 tokens are needed, one sort of all tokens is
    // cheaper than another heap.
    count = count < vocab / 16 ? 4 * count : vocab;
    tokens = LikeliestTokens(distribution.logits, count);
    kept = WeightOf(distribution, tokens);
  }
  double sum = 0;
  size_t size = 0;
  while (size < tokens.size() && (size == 0 || sum < wanted)) {
    const double weight = distribution.Weight(tokens[size]);
    if (weight == 0 || distribution.LogWeight(tokens[size]) < least) break;
    sum += weight;
    ++size;
  }
  tokens.resize(size);
  return tokens;
}

// Draws one of `tokens`.
size_t DrawAmong(const Distribution& distribution,
                 const std::vector<int32_t>& tokens, float uniform) {
  double rest = uniform * WeightOf(distribution, tokens);
  for (const int32_t token : tokens) {
    rest -= distribution.Weight(token);
    if (rest < 0) return token;
  }
  return tokens.back();
}

// Returns the log-probabilities of tokens, given the log of the sum of the
// weights.
std::vector<float> LogprobsOf(const Distribution& distribution,
                              const std::vector<int32_t>& tokens,
                              double log_total) {
  std::vector<float> logprobs;
  logprobs.reserve(tokens.size());
  for (const int32_t token : tokens) {
    logprobs.push_back(
        static_cast<float>(distribution.LogWeight(token) - log_total));
  }
  return logprobs;
}

// Returns the log-probabilities of tokens among all; of a whole row with the
// bits of a forward pass that scores them.
std::vector<float> LogprobsAmongAll(const Distribution& distribution,
                                    const std::vector<int32_t>& tokens) {
  if (distribution.log_total.has_value()) {
    return LogprobsOf(distribution, tokens, *distribution.log_total);
  }
  const std::vector<int64_t> targets(tokens.begin(), tokens.end());
  std::vector<float> logprobs(tokens.size());
  // Without write_softmax, the kernel does not write to the logits.
  kernels::cpu::Kernels().vocab_row(
      const_cast<float*>(distribution.logits.data()),
      static_cast<int64_t>(distribution.logits.size()),
      {.temperature = distribution.temperature}, targets.data(),
      static_cast<int64_t>(targets.size()), logprobs.data(),
      /*entropy=*/nullptr);
  return logprobs;
}

// Sets the log-probability of the result's token, if it has one, and its lists.
// `kept` has the tokens that the filters keep, the likeliest first; empty
// without filters.
void Score(const Distribution& distribution, const DrawConfig& config,
           std::vector<int32_t> kept, DrawResult& result) {
  const size_t vocab = distribution.logits.size();
  const bool among_kept = config.truncated_logprobs && !kept.empty();
  std::vector<int32_t> tokens;  // The likeliest, then the drawn token.
  if (config.top_logprobs > 0) {
    const size_t count =
        std::min(static_cast<size_t>(config.top_logprobs), vocab);
    tokens = among_kept ? kept : LikeliestTokens(distribution.logits, count);
    tokens.resize(std::min(count, tokens.size()));
  }
  const size_t num_top = tokens.size();
  if (result.token >= 0) tokens.push_back(result.token);
  const std::vector<float> logprobs =
      among_kept ? LogprobsOf(distribution, tokens,
                              std::log(WeightOf(distribution, kept)))
                 : LogprobsAmongAll(distribution, tokens);
  for (size_t i = 0; i < num_top; ++i) {
    result.top_logprobs.emplace_back(tokens[i], logprobs[i]);
  }
  if (result.token >= 0) result.logprob = logprobs.back();
  if (!config.support ||
      (kept.size() == vocab && !distribution.log_total.has_value())) {
    return;
  }
  std::ranges::sort(kept);
  result.support = std::move(kept);
}

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                   std::array<uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * counter[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

float CounterUniform(uint64_t seed, uint32_t sample_index, uint32_t position) {
  const std::array<uint32_t, 4> bits = Philox4x32(
      {sample_index, position, 0, 0},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<float>(bits[0] >> 8) * 0x1p-24F;
}

std::optional<DrawResult> DrawToken(absl::Span<const float> logits,
                                    const DrawConfig& config, float uniform) {
  const Best best = FindBest(logits);
  const Distribution distribution =
      DistributionOf(logits, best.logit, config.temperature);
  const double total = TotalWeight(distribution);
  // If all logits are -inf, best.logit is the lowest finite number. But the
  // total is 0, so this case is refused, too.
  if (!std::isfinite(best.logit) || !std::isfinite(total) || total == 0) {
    return std::nullopt;
  }

  size_t token = 0;
  std::vector<int32_t> kept;
  if (config.temperature == 0) {
    token = std::find(logits.begin() + best.block, logits.end(), best.logit) -
            logits.begin();
  } else if (IsFiltered(config)) {
    kept = FilteredTokens(distribution, config, total);
    token = DrawAmong(distribution, kept, uniform);
  } else {
    token = DrawUnfiltered(distribution, total, uniform);
  }
  DrawResult result;
  result.token = static_cast<int32_t>(token);
  Score(distribution, config, std::move(kept), result);
  return result;
}

size_t ListSize(const DrawConfig& config, size_t vocab) {
  auto size = static_cast<size_t>(config.top_logprobs);
  if (IsFiltered(config) && (config.truncated_logprobs || config.support)) {
    size = config.top_k > 0 ? std::max(size, static_cast<size_t>(config.top_k))
                            : vocab;
  }
  return std::min(size, vocab);
}

DrawResult DrawFromList(const TokenList& list, const DrawConfig& config,
                        float uniform, const DrawResult& drawn) {
  Distribution distribution = DistributionOf(
      list.logits, *std::ranges::max_element(list.logits), config.temperature);
  distribution.log_total = list.log_total;
  DrawResult result = drawn;
  std::vector<int32_t> kept;
  // From here to the end, tokens are places in the list; -1: none.
  if (IsFiltered(config) && (config.truncated_logprobs || config.support)) {
    kept = FilteredTokens(distribution, config, /*total=*/0);
    result.token = static_cast<int32_t>(DrawAmong(distribution, kept, uniform));
  } else {
    const auto found = std::ranges::lower_bound(list.tokens, drawn.token);
    result.token = found != list.tokens.end() && *found == drawn.token
                       ? static_cast<int32_t>(found - list.tokens.begin())
                       : -1;
  }
  Score(distribution, config, std::move(kept), result);
  result.token = result.token >= 0 ? list.tokens[result.token] : drawn.token;
  for (auto& [token, logprob] : result.top_logprobs) token = list.tokens[token];
  for (int32_t& token : result.support) token = list.tokens[token];
  return result;
}

}  // namespace weft::sampling
