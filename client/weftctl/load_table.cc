#include "client/weftctl/load_table.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/weftctl/output.h"

namespace weft::client::weftctl {
namespace {

// Returns the growth of a total per second. Returns "-" if there is no earlier
// total, no time has passed, or the total has fallen because the server
// restarted.
std::string Rate(std::optional<uint64_t> before, uint64_t now, double seconds) {
  if (!before || now < *before || seconds <= 0) return "-";
  return absl::StrFormat("%.1f", static_cast<double>(now - *before) / seconds);
}

std::string Share(uint64_t used, uint64_t total) {
  if (total == 0) return "-";
  return absl::StrCat(FormatBytes(used), " of ", FormatBytes(total));
}

std::vector<Row> ServerRows(const std::optional<LoadSample>& before,
                            const LoadSample& now, double seconds) {
  const v1::ServerLoad& load = now.info.load();
  const auto rate = [&](auto total) {
    std::optional<uint64_t> old;
    if (before) old = (before->info.load().*total)();
    return Rate(old, (load.*total)(), seconds);
  };
  const Row state = {"state", DescribeState(now.info)};
  if (!now.info.has_load()) return {state};
  return {
      state,
      {"up", absl::StrFormat("%.0f s", load.uptime_seconds())},
      {"calls in flight", absl::StrCat(load.calls_in_flight())},
      {"queued", absl::StrCat(load.queued_requests())},
      {"trained tokens/s", rate(&v1::ServerLoad::train_tokens)},
      {"prompt tokens/s", rate(&v1::ServerLoad::prompt_tokens)},
      {"sampled tokens/s", rate(&v1::ServerLoad::sampled_tokens)},
      {"optimizer steps/s", rate(&v1::ServerLoad::optim_steps)},
      {"process memory", FormatBytes(load.process_bytes())},
      {"device memory",
       Share(load.device_used_bytes(), load.device_total_bytes())},
      {"keys and values", Share(load.kv_used_bytes(), load.kv_total_bytes())}};
}

std::vector<Row> AdapterRows(const std::optional<LoadSample>& before,
                             const LoadSample& now, double seconds,
                             size_t max_adapters) {
  std::map<std::string, uint64_t> steps;
  if (before) {
    for (const v1::Adapter& adapter : before->adapters.adapters()) {
      steps[adapter.adapter_id()] = adapter.last_step();
    }
  }
  std::vector<v1::Adapter> latest(now.adapters.adapters().begin(),
                                  now.adapters.adapters().end());
  std::stable_sort(latest.begin(), latest.end(),
                   [](const v1::Adapter& a, const v1::Adapter& b) {
                     return a.last_used_at() > b.last_used_at();
                   });
  std::vector<Row> rows = {{"ADAPTER", "TENANT", "STATE", "STEP", "STEPS/S",
                            "OPTIM", "MEMORY", "USED"}};
  for (const v1::Adapter& adapter : latest) {
    if (rows.size() > max_adapters) break;
    const auto old = steps.find(adapter.adapter_id());
    rows.push_back(
        {adapter.adapter_id(), adapter.tenant(), DescribeState(adapter),
         absl::StrCat(adapter.last_step()),
         Rate(old == steps.end() ? std::nullopt : std::optional(old->second),
              adapter.last_step(), seconds),
         absl::StrCat(adapter.optim_steps()),
         FormatBytes(adapter.resident_bytes()),
         FormatTime(adapter.last_used_at())});
  }
  return rows;
}

}  // namespace

std::string DescribeState(const v1::ServerInfo& info) {
  if (info.draining()) return "draining: takes no new work";
  if (info.model().architecture().empty()) return "starting";
  if (info.num_restoring() == 0) return "serving";
  return absl::StrCat(
      "restoring ", info.num_restoring(), " of ", info.num_adapters(),
      " adapters",
      info.restore_seconds() > 0
          ? absl::StrFormat(", about %.0f s left", info.restore_seconds())
          : "");
}

std::string DescribeState(const v1::Adapter& adapter) {
  return adapter.restoring() ? "restoring" : "ready";
}

std::string LoadTable(const std::optional<LoadSample>& before,
                      const LoadSample& now, size_t max_adapters) {
  const double seconds = before ? now.seconds - before->seconds : 0;
  std::ostringstream out;
  PrintTable(ServerRows(before, now, seconds), out);
  out << "\n";
  PrintTable(AdapterRows(before, now, seconds, max_adapters), out);
  const auto size = static_cast<size_t>(now.adapters.adapters_size());
  if (size > max_adapters) {
    out << "and " << size - max_adapters << " more\n";
  }
  return out.str();
}

}  // namespace weft::client::weftctl
