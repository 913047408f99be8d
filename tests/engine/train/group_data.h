// Training data that share prompts.
#ifndef WEFT_TESTS_ENGINE_TRAIN_GROUP_DATA_H_
#define WEFT_TESTS_ENGINE_TRAIN_GROUP_DATA_H_

#include <cstdint>
#include <vector>

#include "src/request/train.h"

namespace weft::testing {

// The size of TinyConfig's vocabulary.
inline constexpr int32_t kTinyVocab = 53;

// Makes targets and signed weights for every position, so that rows of the
// prompt get the gradients of all data that share them.
inline Datum MakeDatum(const std::vector<int32_t>& tokens, int salt) {
  Datum datum;
  datum.tokens = tokens;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto n = static_cast<int32_t>(i);
    datum.targets.push_back((tokens[i] * 7 + n + salt) % kTinyVocab);
    datum.weights.push_back(0.25F * static_cast<float>((n + salt) % 7 - 3));
  }
  return datum;
}

inline std::vector<int32_t> Tokens(int32_t first, int length) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < length; ++i) {
    tokens.push_back((first + 5 * i) % kTinyVocab);
  }
  return tokens;
}

inline std::vector<int32_t> Join(std::vector<int32_t> head,
                                 const std::vector<int32_t>& tail) {
  head.insert(head.end(), tail.begin(), tail.end());
  return head;
}

inline std::vector<Datum> Group(int size, int prompt, int completion) {
  std::vector<Datum> data;
  for (int g = 0; g < size; ++g) {
    data.push_back(
        MakeDatum(Join(Tokens(3, prompt), Tokens(11 + 2 * g, completion)), g));
  }
  return data;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_ENGINE_TRAIN_GROUP_DATA_H_
