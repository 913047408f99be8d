#include "server/tinker/wire/body.h"

#include <zstd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::server::tinker {
namespace {

absl::Status TooLarge(size_t max_bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("the body has more than ", max_bytes, " bytes"));
}

struct FreeStream {
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};

// Calls `take(c)` for each character of the text that is not inside a string.
// Of a string, only its two quotes are passed.
template <typename Take>
void ForEachOutside(absl::string_view text, const Take& take) {
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\') {
      ++i;
    } else if (c == '"') {
      quoted = !quoted;
      take(c);
    } else if (!quoted) {
      take(c);
    }
  }
}

// Returns true if objects and lists are nested deeper than kMaxJsonDepth. The
// JSON library copies and prints nested values by recursion, so a deep body
// could overflow the stack.
bool IsTooDeep(absl::string_view text) {
  int depth = 0;
  int deepest = 0;
  ForEachOutside(text, [&](char c) {
    if (c == '{' || c == '[') deepest = std::max(deepest, ++depth);
    if (c == '}' || c == ']') --depth;
  });
  return deepest > kMaxJsonDepth;
}

// The largest window of a zstd frame, as log2 of bytes (8 MiB). A larger window
// would take memory that no body needs.
constexpr int kMaxWindowLog = 23;

absl::Status Inflate(size_t max_bytes, std::string* body) {
  const std::unique_ptr<ZSTD_DStream, FreeStream> stream(ZSTD_createDStream());
  ZSTD_DCtx_setParameter(stream.get(), ZSTD_d_windowLogMax, kMaxWindowLog);
  std::string out;
  ZSTD_inBuffer from{body->data(), body->size(), 0};
  size_t wanted = 1;
  while (wanted != 0) {
    const size_t begin = out.size();
    if (begin > max_bytes) return TooLarge(max_bytes);
    out.resize(begin + ZSTD_DStreamOutSize());
    ZSTD_outBuffer to{out.data(), out.size(), begin};
    const size_t consumed = from.pos;
    wanted = ZSTD_decompressStream(stream.get(), &to, &from);
    out.resize(to.pos);
    const bool stuck = from.pos == consumed && to.pos == begin;
    if (ZSTD_isError(wanted) != 0 || (wanted != 0 && stuck)) {
      return absl::InvalidArgumentError("the body is not zstd");
    }
  }
  if (from.pos != from.size) {
    return absl::InvalidArgumentError("the body goes on behind its zstd frame");
  }
  if (out.size() > max_bytes) return TooLarge(max_bytes);
  *body = std::move(out);
  return absl::OkStatus();
}

}  // namespace

absl::Status Decode(absl::string_view encoding, size_t max_bytes,
                    std::string* body) {
  if (encoding.empty() || encoding == "identity") return absl::OkStatus();
  if (encoding == "zstd") return Inflate(max_bytes, body);
  return absl::InvalidArgumentError("Content-Encoding must be zstd or absent");
}

int64_t ParsedJsonBytes(absl::string_view text) {
  // What the library allocates for a value in a growing list, for an object or
  // list, for a field, and for half a string (it has two quotes).
  constexpr int64_t kValue = 32;
  constexpr int64_t kContainer = 96;
  constexpr int64_t kField = 96;
  constexpr int64_t kHalfString = 32;
  auto bytes = static_cast<int64_t>(text.size());
  ForEachOutside(text, [&bytes](char c) {
    if (c == ',') bytes += kValue;
    if (c == '{' || c == '[') bytes += kContainer;
    if (c == ':') bytes += kField;
    if (c == '"') bytes += kHalfString;
  });
  return bytes;
}

absl::StatusOr<nlohmann::json> ParseObject(absl::string_view text) {
  if (text.size() > kMaxJsonBytes) return TooLarge(kMaxJsonBytes);
  if (text.empty()) return nlohmann::json::object();
  if (IsTooDeep(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the body is nested deeper than ", kMaxJsonDepth));
  }
  auto parsed = nlohmann::json::parse(text.begin(), text.end(), /*cb=*/nullptr,
                                      /*allow_exceptions=*/false);
  if (!parsed.is_object()) {
    return absl::InvalidArgumentError("the body is not a JSON object");
  }
  return parsed;
}

}  // namespace weft::server::tinker
