// Cuts a step's attention into items of about equal cost. Which thread does what, and into how many pieces a long
// context is cut, changes no result: see PM_TILE.
#include "kernels.h"

namespace {

struct Planner {
  const pm_pool &pool;
  const pm_rows &rows;
  const pm_groups &groups;
  pm_plan &plan;
  int heads, item_tokens;
  int64_t state_floats;
  bool full = false;

  void add(pm_item item) {
    if (plan.num_items == plan.capacity)
      full = true;
    else
      plan.items[plan.num_items++] = item;
  }

  // Items of all KV heads for some tokens of a group or a row; `seen` positions end in the last tile.
  void add_tokens(int row, int token, int num_tokens, int tile, int num_tiles, int position, int flags) {
    for (int from = 0; from < num_tokens; from += item_tokens) {
      const int count = num_tokens - from < item_tokens ? num_tokens - from : item_tokens;
      int tiles = num_tiles;
      if (!(flags & PM_GROUPED)) tiles = (position + from + count + PM_TILE - 1) / PM_TILE - tile;
      for (int head = 0; head < pool.num_kv_heads; ++head)
        // Reading and packing a tile costs about as much as computing 8 rows of it.
        add({row, head, token + from, count, tile, tiles, position + from, flags, 0,
             (int64_t)tiles * (count * heads + 8)});
    }
  }

  void add_groups() {
    for (int g = 0; g < groups.num_groups; ++g)
      add_tokens(groups.rows[g], groups.starts[g], groups.starts[g + 1] - groups.starts[g], 0,
                 groups.lens[g] / PM_TILE, 0, PM_GROUPED | PM_SUSPEND);
  }

  void add_rows() {
    for (int row = 0; row < rows.num_rows; ++row) {
      const int token = rows.query_starts[row], count = rows.query_starts[row + 1] - token;
      const int shared = groups.num_groups ? groups.shared_lens[row] / PM_TILE : 0;
      const int position = rows.context_lens[row] - count;
      add_tokens(row, token, count, shared, 0, position, shared ? PM_RESUME : 0);
    }
  }

  // Cuts items that would keep one thread busy when the others have finished: their pieces come first, and what puts
  // the pieces together takes their place. A group's items are not cut: there is one per KV head and some 30 tokens.
  void split(int num_threads) {
    int64_t total = 0;
    for (int i = 0; i < plan.num_items; ++i) total += plan.items[i].cost;
    const int64_t fair = total / (2 * num_threads) + 1;
    const int end = plan.num_items;
    for (int i = plan.num_first; num_threads > 1 && i < end; ++i) {
      pm_item &item = plan.items[i];
      if (item.cost <= fair || item.num_tiles < 8) continue;
      int pieces = (int)(item.cost * 2 / fair) + 1;
      if (pieces > item.num_tiles / 2) pieces = item.num_tiles / 2;
      const int64_t tile_floats = item.num_tokens * heads * state_floats;
      item.partials = plan.workspace_floats;
      plan.workspace_floats += item.num_tiles * tile_floats;
      for (int piece = 0; piece < pieces; ++piece) {
        const int from = item.num_tiles * piece / pieces, to = item.num_tiles * (piece + 1) / pieces;
        pm_item part = item;
        part.tile += from;
        part.num_tiles = to - from;
        part.flags = PM_PARTIAL;
        part.partials += from * tile_floats;
        part.cost = item.cost * (to - from) / item.num_tiles;
        add(part);
      }
      item.flags |= PM_FOLD;
      item.cost = item.num_tiles;
    }
    bring_forward(end);
  }

  // The pieces, which lie from `from` on, to where the others begin.
  void bring_forward(int from) {
    for (int i = from; i < plan.num_items; ++i) {
      const pm_item piece = plan.items[i];
      for (int j = i; j > plan.num_first; --j) plan.items[j] = plan.items[j - 1];
      plan.items[plan.num_first++] = piece;
    }
  }

  // Largest first, so that the last to finish is a small one; of equal ones the KV heads of a row together, because what
  // they read lies together. Shell sort: short, in place, a few hundred items.
  static bool before(const pm_item &a, const pm_item &b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    if (a.token != b.token) return a.token < b.token;
    if (a.tile != b.tile) return a.tile < b.tile;
    return a.kv_head < b.kv_head;
  }
  static void sort(pm_item *items, int count) {
    for (int gap = count / 2; gap; gap /= 2)
      for (int i = gap; i < count; ++i) {
        const pm_item item = items[i];
        int j = i;
        for (; j >= gap && before(item, items[j - gap]); j -= gap) items[j] = items[j - gap];
        items[j] = item;
      }
  }
};

}  // namespace

PM_EXPORT int32_t pm_plan_attention(const pm_pool *pool, const pm_rows *rows, const pm_groups *groups,
                                    int32_t num_threads, pm_plan *plan) {
  const int heads = rows->num_heads / pool->num_kv_heads;
  Planner planner{*pool, *rows, *groups, *plan, heads, heads < PM_ITEM_ROWS ? PM_ITEM_ROWS / heads : 1, pool->head_dim + 2};
  plan->num_items = plan->num_first = 0;
  plan->workspace_floats = 0;
  planner.add_groups();
  plan->num_first = plan->num_items;
  if (groups->num_groups)
    plan->workspace_floats = rows->query_starts[rows->num_rows] * (int64_t)rows->num_heads * planner.state_floats;
  planner.add_rows();
  planner.split(num_threads);
  if (planner.full) return -1;
  Planner::sort(plan->items, plan->num_first);
  Planner::sort(plan->items + plan->num_first, plan->num_items - plan->num_first);
  return 0;
}
