#include "client/weftctl/balance.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace weft::client::weftctl {
namespace {

constexpr size_t kLeastDifference = 1;
constexpr size_t kShareOfMean = 10;

}  // namespace

LogLoad LoadOf(int log, const v1::ListAdaptersResponse& list) {
  std::vector<const v1::Adapter*> movable;
  for (const v1::Adapter& one : list.adapters()) {
    if (one.durability() == v1::DURABILITY_STEP && !one.restoring()) {
      movable.push_back(&one);
    }
  }
  std::ranges::stable_sort(movable, [](const auto* a, const auto* b) {
    return a->last_used_at() > b->last_used_at();
  });
  LogLoad load = {.log = log,
                  .num_adapters = static_cast<size_t>(list.adapters_size())};
  for (const v1::Adapter* const one : movable) {
    load.movable.push_back(one->adapter_id());
  }
  return load;
}

std::optional<BalanceMove> NextMove(std::vector<LogLoad>& logs) {
  std::optional<size_t> from;
  std::optional<size_t> to;
  size_t sum = 0;
  for (size_t i = 0; i < logs.size(); ++i) {
    const LogLoad& one = logs[i];
    sum += one.num_adapters;
    if (!one.movable.empty() &&
        (!from || one.num_adapters > logs[*from].num_adapters)) {
      from = i;
    }
    if (one.takes && (!to || one.num_adapters < logs[*to].num_adapters)) {
      to = i;
    }
  }
  const size_t difference = std::max(
      kLeastDifference, sum / std::max<size_t>(logs.size(), 1) / kShareOfMean);
  if (!from || !to ||
      logs[*from].num_adapters <= logs[*to].num_adapters + difference) {
    return std::nullopt;
  }
  BalanceMove move = {.adapter_id = std::move(logs[*from].movable.back()),
                      .from = *from,
                      .to = *to};
  logs[*from].movable.pop_back();
  return move;
}

}  // namespace weft::client::weftctl
