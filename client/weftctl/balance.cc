#include "client/weftctl/balance.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include "src/request/move_unit.h"

namespace weft::client::weftctl {
namespace {

constexpr size_t kLeastDifference = 1;
constexpr size_t kShareOfMean = 10;

struct Unit {
  std::string adapter_id;
  size_t num_adapters = 0;
  double last_used_at = 0;
  bool stays = false;
};

}  // namespace

LogLoad LoadOf(int log, const v1::ListAdaptersResponse& list) {
  std::map<std::string, Unit> units;
  for (const v1::Adapter& one : list.adapters()) {
    Unit& unit = units[UnitOf(one.adapter_id())];
    unit.adapter_id = one.adapter_id();
    ++unit.num_adapters;
    unit.last_used_at = std::max(unit.last_used_at, one.last_used_at());
    if (one.durability() != v1::DURABILITY_STEP || one.restoring()) {
      unit.stays = true;
    }
  }
  std::vector<Unit> movable;
  for (const auto& [name, unit] : units) {
    if (!unit.stays) movable.push_back(unit);
  }
  std::ranges::stable_sort(movable, std::greater(), &Unit::last_used_at);
  LogLoad load = {.log = log,
                  .num_adapters = static_cast<size_t>(list.adapters_size())};
  for (const Unit& one : movable) {
    load.movable.push_back(
        {.adapter_id = one.adapter_id, .num_adapters = one.num_adapters});
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
  if (!from || !to) return std::nullopt;
  std::vector<MovableUnit>& movable = logs[*from].movable;
  const auto fits = [&](const MovableUnit& unit) {
    return logs[*from].num_adapters >
           logs[*to].num_adapters + std::max(difference, unit.num_adapters);
  };
  const auto unit = std::find_if(movable.rbegin(), movable.rend(), fits);
  if (unit == movable.rend()) return std::nullopt;
  BalanceMove move = {
      .adapter_id = std::move(unit->adapter_id), .from = *from, .to = *to};
  movable.erase(std::next(unit).base());
  return move;
}

}  // namespace weft::client::weftctl
