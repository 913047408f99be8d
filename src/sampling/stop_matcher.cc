#include "src/sampling/stop_matcher.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"

namespace weft::sampling {
namespace {

// Removes all elements except the last `count`.
template <typename Sequence>
void KeepLast(Sequence& sequence, size_t count) {
  if (sequence.size() <= count) return;
  sequence.erase(sequence.begin(), sequence.end() - count);
}

bool EndsWith(const std::vector<int32_t>& tokens,
              const std::vector<int32_t>& end) {
  return tokens.size() >= end.size() &&
         std::equal(end.rbegin(), end.rend(), tokens.rbegin());
}

using Json = nlohmann::json;

constexpr int64_t kMaxTokenId = (1 << 22) - 1;
constexpr uintmax_t kMaxFileBytes = uintmax_t{256} << 20;
constexpr char32_t kBadCodePoint = 0xffffffff;

// The alphabet of byte-level vocabularies, which write every byte as a visible
// character. A byte that is a visible character of Latin-1 is written as that
// character. The other bytes, such as the space, are written as U+0100, U+0101
// and so on, in ascending order. Source: the byte encoder of GPT-2.
class ByteAlphabet {
 public:
  ByteAlphabet() : byte_of_(kSize, -1) {
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
      byte_of_[printable ? static_cast<char32_t>(byte) : next++] =
          static_cast<int16_t>(byte);
    }
  }

  // Returns the bytes for which `token` stands. A token with a character
  // outside the alphabet stands for itself, as in the tokenizers library.
  std::string Decode(absl::string_view token) const {
    std::string bytes;
    for (size_t i = 0; i < token.size();) {
      const char32_t code = NextCodePoint(token, i);
      if (code >= kSize || byte_of_[code] < 0) return std::string(token);
      bytes.push_back(static_cast<char>(byte_of_[code]));
    }
    return bytes;
  }

 private:
  static constexpr size_t kSize = 0x100 + 68;

  // Reads the code point at `i` and advances `i`. Returns kBadCodePoint for
  // code points above U+07FF, which the alphabet does not have.
  static char32_t NextCodePoint(absl::string_view text, size_t& i) {
    const auto first = static_cast<unsigned char>(text[i++]);
    if (first < 0x80) return first;
    if ((first & 0xe0) != 0xc0 || i == text.size()) return kBadCodePoint;
    const auto second = static_cast<unsigned char>(text[i++]);
    return (static_cast<char32_t>(first & 0x1f) << 6) | (second & 0x3f);
  }

  std::vector<int16_t> byte_of_;
};

// The alphabet of SentencePiece's vocabularies, which write a space as a
// special character. A token for a single byte is written like `<0xE2>`.
class PieceAlphabet {
 public:
  // `space` is the special character for a space. If it is empty, a space is
  // written as itself.
  explicit PieceAlphabet(std::string space) : space_(std::move(space)) {}

  std::string Decode(absl::string_view token) const {
    int byte = 0;
    if (token.size() == 6 && absl::StartsWith(token, "<0x") &&
        token.back() == '>' && absl::SimpleHexAtoi(token.substr(3, 2), &byte)) {
      return std::string(1, static_cast<char>(byte));
    }
    if (space_.empty()) return std::string(token);
    return absl::StrReplaceAll(token, {{space_, " "}});
  }

 private:
  std::string space_;
};

absl::Status Damaged(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: ", what));
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    return absl::NotFoundError(absl::StrCat(path, " does not exist"));
  }
  if (!std::filesystem::is_regular_file(status)) {
    return Damaged("not a regular file");
  }
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > kMaxFileBytes) {
    return Damaged(absl::StrCat("more than ", kMaxFileBytes, " bytes"));
  }
  std::ifstream stream(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

// Returns the steps of a sequence decoder. Any other decoder is returned as a
// single step. Returns no steps if the JSON has another form.
std::vector<Json> DecoderSteps(const Json& decoder) {
  if (!decoder.is_object()) return {};
  const auto steps = decoder.find("decoders");
  if (steps == decoder.end()) return {decoder};
  if (!steps->is_array()) return {};
  return {steps->begin(), steps->end()};
}

absl::Status Unsupported() {
  return absl::UnimplementedError(
      "tokenizer.json: not a BPE tokenizer that is byte-level or has byte "
      "fallback; string stops need one");
}

// Returns the string that a step of a byte fallback decoder replaces by a
// space, or an empty string if the step replaces none. Errors: UNIMPLEMENTED
// for an unknown kind of step.
absl::StatusOr<std::string> SpaceOf(const Json& step) {
  const Json type = step.is_object() ? step.value("type", Json()) : Json();
  // Strip changes only the beginning of a text, and Fuse changes nothing.
  if (type == "ByteFallback" || type == "Fuse" || type == "Strip") return "";
  if (type == "Metaspace") {
    const Json space = step.value("replacement", Json());
    if (space.is_string()) return space.get<std::string>();
  }
  if (type == "Replace" && step.value("content", Json()) == " ") {
    const Json pattern = step.value("pattern", Json::object());
    const Json space =
        pattern.is_object() ? pattern.value("String", Json()) : Json();
    if (space.is_string()) return space.get<std::string>();
  }
  return Unsupported();
}

using Decode = std::function<std::string(absl::string_view)>;

// Returns the function that converts a token of the vocabulary to bytes.
absl::StatusOr<Decode> DecodeOf(const Json& root) {
  const std::vector<Json> steps = DecoderSteps(root.value("decoder", Json()));
  const auto has = [&steps](const char* type) {
    return std::ranges::any_of(steps, [type](const Json& step) {
      return step.is_object() && step.value("type", Json()) == type;
    });
  };
  if (has("ByteLevel")) {
    return [alphabet = ByteAlphabet()](absl::string_view token) {
      return alphabet.Decode(token);
    };
  }
  if (!has("ByteFallback")) return Unsupported();
  std::string space;
  for (const Json& step : steps) {
    WEFT_ASSIGN_OR_RETURN(std::string own, SpaceOf(step));
    if (!own.empty()) space = std::move(own);
  }
  return [alphabet = PieceAlphabet(space)](absl::string_view token) {
    return alphabet.Decode(token);
  };
}

absl::Status Place(const Json& id, std::string bytes,
                   std::vector<std::string>& table) {
  if (!id.is_number_unsigned() || id.get<uint64_t>() > kMaxTokenId) {
    return Damaged(
        absl::StrCat("a token id is not an integer in [0, ", kMaxTokenId, "]"));
  }
  const auto index = id.get<size_t>();
  if (index >= table.size()) table.resize(index + 1);
  table[index] = std::move(bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ReadTable(const Json& root) {
  const auto model = root.find("model");  // Not a copy: it has the vocabulary.
  if (model == root.end() || !model->is_object()) return Damaged("no model");
  if (model->value("type", Json("BPE")) != "BPE") return Unsupported();
  WEFT_ASSIGN_OR_RETURN(const Decode decode, DecodeOf(root));
  const auto vocab = model->find("vocab");
  if (vocab == model->end() || !vocab->is_object()) return Damaged("no vocab");
  std::vector<std::string> table;
  for (const auto& [token, id] : vocab->items()) {
    WEFT_RETURN_IF_ERROR(Place(id, decode(token), table));
  }
  const Json added = root.value("added_tokens", Json::array());
  if (!added.is_array()) return Damaged("added_tokens is not a list");
  for (const Json& token : added) {
    if (!token.is_object() || !token.value("content", Json()).is_string()) {
      return Damaged("an added token has no content");
    }
    // The tokenizers library decodes added tokens like tokens of the
    // vocabulary. For example, Gemma's runs of spaces are added tokens.
    WEFT_RETURN_IF_ERROR(Place(token.value("id", Json()),
                               decode(token["content"].get<std::string>()),
                               table));
  }
  return table;
}

}  // namespace

StopMatcher::StopMatcher(const StopRule& rule, const TokenBytes* token_bytes)
    : rule_(rule), token_bytes_(token_bytes) {
  // An empty sequence would match everywhere, even before the first token.
  std::erase_if(rule_.token_sequences,
                [](const auto& sequence) { return sequence.empty(); });
  std::erase_if(rule_.byte_strings,
                [](const auto& text) { return text.empty(); });
  for (const auto& sequence : rule_.token_sequences) {
    longest_sequence_ = std::max(longest_sequence_, sequence.size());
  }
  for (const std::string& text : rule_.byte_strings) {
    longest_string_ = std::max(longest_string_, text.size());
  }
}

bool StopMatcher::Push(int32_t token) {
  bool stops =
      std::ranges::find(rule_.token_ids, token) != rule_.token_ids.end();
  if (longest_sequence_ > 0) {
    recent_.push_back(token);
    KeepLast(recent_, longest_sequence_);
    stops |= std::ranges::any_of(
        rule_.token_sequences,
        [this](const auto& sequence) { return EndsWith(recent_, sequence); });
  }
  if (longest_string_ > 0 && token_bytes_ != nullptr) {
    const size_t old = tail_.size();
    tail_ += token_bytes_->Bytes(token);
    // A match may begin in the bytes of earlier tokens, which tail_ keeps. It
    // must end in this token: the sample may have gone on after an earlier one.
    stops |= std::ranges::any_of(rule_.byte_strings, [&](const auto& text) {
      const size_t first = old < text.size() ? 0 : old - text.size() + 1;
      return tail_.find(text, first) != std::string::npos;
    });
    KeepLast(tail_, longest_string_ - 1);
  }
  return stops;
}

absl::StatusOr<TokenBytes> TokenBytes::Load(const std::string& model_dir) {
  const absl::StatusOr<std::string> file =
      ReadFile(absl::StrCat(model_dir, "/tokenizer.json"));
  std::error_code error;
  if (absl::IsNotFound(file.status()) &&
      std::filesystem::exists(model_dir + "/tokenizer.model", error)) {
    return absl::NotFoundError(absl::StrCat(
        file.status().message(),
        ", only tokenizer.model; transformers makes one: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"));
  }
  WEFT_RETURN_IF_ERROR(file.status());
  const std::string& text = *file;
  // The merges are most of the file, and decoding does not need them.
  const auto skip_merges = [](int depth, Json::parse_event_t event,
                              Json& value) {
    return !(depth == 2 && event == Json::parse_event_t::key &&
             value == "merges");
  };
  const Json root = Json::parse(text.begin(), text.end(), skip_merges,
                                /*allow_exceptions=*/false);
  if (!root.is_object()) return Damaged("not a JSON object in UTF-8");
  TokenBytes result;
  WEFT_ASSIGN_OR_RETURN(result.bytes_, ReadTable(root));
  return result;
}

const std::string& TokenBytes::Bytes(int32_t token) const {
  static const std::string& none = *new std::string();
  if (token < 0 || static_cast<size_t>(token) >= bytes_.size()) return none;
  return bytes_[token];
}

}  // namespace weft::sampling
