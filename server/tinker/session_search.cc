#include "server/tinker/session_search.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "server/field_checks.h"
#include "server/tinker/fields.h"
#include "server/tinker/models.h"
#include "server/tinker/runs.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

constexpr int64_t kMaxPage = 200;

// A session's place in the order of the results.
using Place = std::pair<absl::Time, std::string>;

struct Search {
  std::string session_id;
  std::vector<std::string> words;  // Of the name, in lower case.
  Json user_metadata;
  bool active = true;  // Whether sessions that have not ended match.
  int64_t limit = 50;
  std::optional<Place> before;
};

absl::StatusOr<Search> ReadSearch(const Json& body) {
  if (AsksFor(body, "project_ids")) return NoProjects("project_ids");
  Search search;
  if (Find(body, "owner") != nullptr) {
    WEFT_ASSIGN_OR_RETURN(const Json* const owner, ObjectField(body, "owner"));
    WEFT_ASSIGN_OR_RETURN(const std::string type,
                          StringOr(*owner, "type", "own"));
    if (type != "own" && type != "accessible") {
      return absl::UnimplementedError(absl::StrCat(
          "owner of type ", Quoted(type),
          " is not offered: a token finds the sessions of its own tenant. "
          "Leave it out"));
    }
  }
  WEFT_ASSIGN_OR_RETURN(search.session_id, StringOr(body, "session_id", ""));
  WEFT_ASSIGN_OR_RETURN(const std::string name,
                        StringOr(body, "display_name", ""));
  search.words =
      absl::StrSplit(absl::AsciiStrToLower(name), ' ', absl::SkipWhitespace());
  search.user_metadata = body.value("user_metadata", Json::object());
  if (!search.user_metadata.is_object()) {
    return BadField("user_metadata", "must be an object");
  }
  if (const Json* const statuses = Find(body, "statuses");
      statuses != nullptr) {
    if (!statuses->is_array()) return BadField("statuses", "must be a list");
    search.active = false;
    for (const Json& status : *statuses) {
      if (!status.is_object()) return BadField("statuses", "must have objects");
      WEFT_ASSIGN_OR_RETURN(const std::string type,
                            StringField(status, "type"));
      search.active |= type == "active";
    }
  }
  WEFT_ASSIGN_OR_RETURN(search.limit, IntOr(body, "limit", search.limit));
  WEFT_RETURN_IF_ERROR(CheckReal("limit", static_cast<double>(search.limit),
                                 {.low = 1, .high = kMaxPage}));
  if (Find(body, "cursor") == nullptr) return search;
  WEFT_ASSIGN_OR_RETURN(const Json* const cursor, ObjectField(body, "cursor"));
  WEFT_ASSIGN_OR_RETURN(const std::string at,
                        StringField(*cursor, "last_created_at"));
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        StringField(*cursor, "last_session_id"));
  absl::Time time;
  if (!absl::ParseTime(absl::RFC3339_full, at, &time, nullptr)) {
    return BadField("cursor.last_created_at",
                    "must be the time of an earlier page");
  }
  search.before = Place(time, id);
  return search;
}

bool NameMatches(const Search& search, const Session& session) {
  const Json shown = Shown(session.display_name);
  const std::string name =
      shown.is_string() ? absl::AsciiStrToLower(shown.get<std::string>()) : "";
  return std::ranges::all_of(search.words, [&name](const std::string& word) {
    return absl::StrContains(name, word);
  });
}

bool SessionMatches(const Search& search, const Session& session) {
  const bool by_id = session.id == search.session_id;
  const bool any_id = search.session_id.empty();
  // With both an id and a name, one of the two is enough.
  const bool found = search.words.empty()
                         ? any_id || by_id
                         : (!any_id && by_id) || NameMatches(search, session);
  if (!found || !search.active) return false;
  if (search.user_metadata.empty()) return true;
  const Json metadata = Shown(session.user_metadata);
  for (const auto& [name, value] : search.user_metadata.items()) {
    const auto has = metadata.find(name);  // The end if it is no object.
    if (has == metadata.end() || *has != value) return false;
  }
  return true;
}

Place PlaceOf(const Session& session) {
  return {session.created_at, session.id};
}

Json SummaryOf(const Session& session,
               const std::vector<CheckpointInfo>& checkpoints) {
  const std::string models =
      AdapterOfModel(absl::StrCat(session.id, ":train:"));
  int64_t count = 0;
  int64_t bytes = 0;
  for (const CheckpointInfo& info : checkpoints) {
    if (!absl::StartsWith(info.adapter_id, models)) continue;
    ++count;
    bytes += static_cast<int64_t>(info.size_bytes);
  }
  Json out = {{"session_id", session.id},
              {"created_at", TimeText(session.created_at)},
              {"owner", session.owner},
              {"project_id", ""},
              {"status", {{"type", "active"}}},
              {"checkpoints_count", count},
              {"checkpoint_storage_bytes", bytes}};
  if (!session.display_name.empty()) {
    out["display_name"] = Shown(session.display_name);
  }
  Json metadata = Shown(session.user_metadata);
  if (metadata.is_object()) out["user_metadata"] = std::move(metadata);
  return out;
}

// Returns the sessions of the page, and one more if there are more.
std::vector<const Session*> FindPage(const Front& front, const Call& call,
                                     const Search& search) {
  std::vector<const Session*> found;
  for (const auto& [id, session] : front.sessions) {
    if (session.owner == call.owner() && SessionMatches(search, session) &&
        (!search.before || PlaceOf(session) < *search.before)) {
      found.push_back(&session);
    }
  }
  std::ranges::sort(found, [](const Session* a, const Session* b) {
    return PlaceOf(*b) < PlaceOf(*a);
  });
  found.resize(std::min(found.size(), static_cast<size_t>(search.limit) + 1));
  return found;
}

}  // namespace

absl::Status SearchSessions(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Search search, ReadSearch(call->body));
  v1::ListCheckpointsRequest request;
  return front.port.Call(
      call->origin(), Rpc::kListCheckpoints, request, &Engine::ListCheckpoints,
      [&front, call, search,
       respond](const absl::StatusOr<std::vector<CheckpointInfo>>& listed) {
        if (!listed.ok()) return respond(ErrorReply(listed.status()));
        const auto found = FindPage(front, *call, search);
        const auto size =
            std::min(found.size(), static_cast<size_t>(search.limit));
        Json sessions = Json::array();
        for (size_t i = 0; i < size; ++i) {
          sessions.push_back(SummaryOf(*found[i], *listed));
        }
        Json reply = {{"sessions", sessions}};
        if (found.size() > size) {
          reply["next_cursor"] = {
              {"last_created_at", TimeText(found[size - 1]->created_at)},
              {"last_session_id", found[size - 1]->id}};
        }
        respond(JsonReply(reply));
      });
}

}  // namespace weft::tinker
