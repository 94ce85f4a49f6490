// Paged attention over bf16 or int8 KV for one layer: every token of a step, prefill or decode, is one row with its block
// table and length. Keys are walked in chunks of 64 at the same absolute positions whoever shares them, and a row's
// arithmetic doesn't depend on the rows beside it: grouping changes the speed, never a bit of the result.
//
// Layouts (block_tokens is 16):
//   q    [rows][heads][dim]                 bf16, scaled, times log2 e
//   K, V                                    see chunk.h
//   state[rows][heads][dim + 32]            float32: unnormalized output, 16 sums of weights, the scores' origin
//
// Where a layer has a window, a row sees its last `window` keys only; chunks that no row of a span sees are not read.
//
// The shared pass leaves its running state and the private pass starts from it, so the merge is exact and free.
#include "chunk.h"
#include "dots_amx.h"
#include "dots_vector.h"
#include "team.h"
#include <vector>

namespace {

constexpr int REST = 32;       // of a row's state beside the output
constexpr int FEW_KEYS = 2048;   // of one span: they are read sooner than other threads would wake
constexpr int END = 1 << 30;   // last chunk of a span that goes as far as its rows do
constexpr int RUN = 4;         // spans that a thread walks in a row where there are many; or items, where there are fewer
constexpr int MANY_RUNS = 16;

struct Shape { int heads, kv_heads, dim; int64_t block_bytes; };  // K and V alike
struct Span { int first, last, from, to, table; };                // rows [first, last) over chunks [from, to)
struct Item { Span span; int head; };                             // what one thread walks: a span for one kv head

struct Step {
  Shape s;
  int window;  // keys that a row sees, its own included; 0: all
  const uint16_t* q;
  const uint8_t *k, *v;
  const int32_t *lengths, *tables;
  float *state, *out;
  int first_key(int length) const { return window ? std::max(0, length - window) : 0; }
};

struct Rows {  // of a tile: each sees keys [begin, length); `least` and `most` are the ends of all of them
  int row[MAX_ROWS], head[MAX_ROWS], begin[MAX_ROWS], length[MAX_ROWS], least, most;
};

// The items of a step, level by level.
class Items {
 public:
  Items(const Step& x, const int32_t* spans) : spans(spans), kv_heads(x.s.kv_heads) {}
  Item at(int i) const {
    const int32_t* p = spans + (int64_t)(i / kv_heads) * 5;
    return {{p[0], p[1], p[2], p[3], p[4]}, i % kv_heads};
  }

 private:
  const int32_t* spans;
  const int kv_heads;
};

template <class Dots, class Cache> class Walk {
 public:
  explicit Walk(const Step& step) : x(step), dim(step.s.dim), cache(dim), scratch(1) {}

  // The rows of a span for one kv head. A few chunks are laid out, then tile after tile of rows walks them. `next`: what
  // this thread will walk afterwards, or null; its keys are asked for ahead of time.
  void attend(const Item& item, const Item* next) {
    const Span& span = item.span;
    gather(item);
    dots.begin(tiles.size() > 1 ? Dots::ROWS : tiles[0].n);
    const int end = std::min(span.to, (most + CHUNK - 1) / CHUNK);
    const int start = std::max(span.from, least / CHUNK), next_start = next ? first_chunk(*next) : 0;
    for (int from = start; from < end; from += ROUND) {
      const int to = std::min(from + ROUND, end);
      Keys keys[ROUND];
      for (int c = from; c < to; c++) {
        if (next && tiles.size() == 1) fetch(*next, next_start + c - start);
        keys[c - from] = open(item, c, c - from);
      }
      for (size_t i = 0; i < tiles.size(); i++) walk(tiles[i], rows[i], keys, from, to);
    }
    for (size_t i = 0; i < tiles.size(); i++)
      if (span.to == END) finish(tiles[i], rows[i]); else give(tiles[i], rows[i]);
  }

 private:
  void walk(Tile& t, const Rows& of, Keys* keys, int from, int to) {
    const int start = std::max(from, of.least / CHUNK);
    if (of.most <= start * CHUNK || start >= to) return;
    dots.pick_up(t, dim);
    for (int c = start; c < to && c * CHUNK < of.most; c++) {
      Keys& of_chunk = keys[c - from];
      of_chunk.visible = std::min(CHUNK, of.most - c * CHUNK);
      Seen seen;
      for (int r = 0; r < t.n; r++) {
        seen.begin[r] = of.begin[r] - c * CHUNK;
        seen.end[r] = std::min(CHUNK, of.length[r] - c * CHUNK);
      }
      dots.template score<Cache::IS_INT8>(t, dim, of_chunk);
      weigh<Cache::IS_INT8>(t, dim, seen, of_chunk, dots);
      dots.mix(t, dim, of_chunk);
    }
    dots.put_down(t, dim);
  }

  Keys open(const Item& item, int c, int place) {
    const int64_t at = item.head * Cache::head_bytes(dim);
    return cache.template open<Dots::IN_PLACE>(place, x.k + at, x.v + at, x.s.block_bytes, dim, x.tables + item.span.table + c * CHUNK_BLOCKS,
                      std::min(CHUNK, most - c * CHUNK));
  }

  // Where a span's walk begins: rows are in order, so the first one looks back furthest unless sequences differ.
  int first_chunk(const Item& item) const {
    return std::max(item.span.from, x.first_key(x.lengths[item.span.first]) / CHUNK);
  }

  void fetch(const Item& item, int c) const {
    const int visible = std::min(CHUNK, x.lengths[item.span.last - 1] - c * CHUNK);
    const int32_t* blocks = x.tables + item.span.table + c * CHUNK_BLOCKS;
    if (c >= item.span.to) return;
    for (int b = 0; b * BLOCK < visible; b++) {
      const int64_t at = blocks[b] * x.s.block_bytes + item.head * Cache::head_bytes(dim);
      for (int64_t i = 0; i < Cache::head_bytes(dim); i += 64) {
        __builtin_prefetch(x.k + at + i, 0, 2);
        __builtin_prefetch(x.v + at + i, 0, 2);
      }
    }
  }

  // Takes the item's rows into tiles.
  void gather(const Item& item) {
    const int group = x.s.heads / x.s.kv_heads, total = (item.span.last - item.span.first) * group;
    resize((total + Dots::ROWS - 1) / Dots::ROWS);
    most = 0;
    least = END;
    for (size_t i = 0; i < tiles.size(); i++) {
      const int first = i * Dots::ROWS;
      Tile& t = tiles[i];
      Rows& of = rows[i];
      t.n = std::min(Dots::ROWS, total - first);
      of.most = 0;
      of.least = END;
      for (int r = 0; r < t.n; r++) {
        of.row[r] = item.span.first + (first + r) / group;
        of.head[r] = item.head * group + (first + r) % group;
        of.length[r] = x.lengths[of.row[r]];
        of.begin[r] = x.first_key(of.length[r]);
        of.most = std::max(of.most, of.length[r]);
        of.least = std::min(of.least, of.begin[r]);
      }
      take(t, of, item.span.from == 0);
      most = std::max(most, of.most);
      least = std::min(least, of.least);
    }
  }

  void resize(size_t count) {
    if (count == tiles.size()) return;
    const size_t size = (Tile::bytes(dim) + 63) / 64 * 64;
    memory.grow(count * size);
    tiles.clear();
    for (size_t i = 0; i < count; i++) tiles.emplace_back(memory.at(i * size), dim, *scratch.at(0));
    rows.resize(count);
  }

  void take(Tile& t, const Rows& of, bool is_first) {
    for (int r = 0; r < t.n; r++) {
      const int64_t at = (int64_t)of.row[r] * x.s.heads + of.head[r];
      const float* st = x.state + at * (dim + REST);
      Cache::take_q(t, r, x.q + at * dim, dim);
      if (is_first) {
        std::memset(t.mixed + r * dim, 0, dim * 4);
        std::memset(t.total[r], 0, sizeof t.total[r]);
        t.top[r] = -std::numeric_limits<float>::infinity();
        continue;
      }
      std::memcpy(t.mixed + r * dim, st, dim * 4);
      std::memcpy(t.total[r], st + dim, 64);
      t.top[r] = st[dim + 16];
    }
  }

  // The walk is over: the output is the mix over the sum of weights.
  void finish(const Tile& t, const Rows& of) const {
    for (int r = 0; r < t.n; r++) {
      const f32x16 scale = splat(1.f / sum(load(t.total[r])));
      float* out = x.out + ((int64_t)of.row[r] * x.s.heads + of.head[r]) * dim;
      for (int d = 0; d < dim; d += 16) store(out + d, load(t.mixed + r * dim + d) * scale);
    }
  }

  void give(const Tile& t, const Rows& of) const {
    for (int r = 0; r < t.n; r++) {
      float* st = x.state + ((int64_t)of.row[r] * x.s.heads + of.head[r]) * (dim + REST);
      std::memcpy(st, t.mixed + r * dim, dim * 4);
      std::memcpy(st + dim, t.total[r], 64);
      st[dim + 16] = t.top[r];
    }
  }

  const Step& x;
  const int dim;
  Dots dots;
  Cache cache;
  Buffer<Scratch> scratch;
  Buffer<char> memory;
  std::vector<Tile> tiles;
  std::vector<Rows> rows;
  int least = 0, most = 0;  // the keys that some row sees are among these
};

// Items that a thread takes in a row: the keys of all but the first are asked for while it walks those before.
inline int run_of(int items, int kv_heads) {
  for (const int run : {RUN * kv_heads, RUN})
    if (items > MANY_RUNS * run) return run;
  return 1;
}

template <class Dots, class Cache>
void attend_levels(const Step& x, const int32_t* spans, const int32_t* level_ends, int levels) {
  Walk<Dots, Cache> walk(x);
  const Items items(x, spans);
  int begin = 0;
  for (int level = 0; level < levels; level++) {
    const int end = level_ends[level] * x.s.kv_heads;
    const int run = run_of(end - begin, x.s.kv_heads);
#pragma omp for schedule(dynamic, 1)
    for (int first = begin; first < end; first += run) {
      const int last = std::min(first + run, end);
      for (int i = first; i < last; i++) {
        const Item next = items.at(std::min(i + 1, last - 1));
        walk.attend(items.at(i), i + 1 < last ? &next : nullptr);
      }
    }
    begin = end;
  }
}

template <class Cache> void attend_step(const Step& x, const int32_t* spans, const int32_t* level_ends, int levels) {
#if HAS_AMX
  const bool use_amx = amx_allowed() && x.s.dim % (Cache::IS_INT8 ? 64 : 32) == 0;
#endif
  const bool is_big = levels > 1 || level_ends[0] > 1 || x.lengths[0] > FEW_KEYS;
  in_team(is_big, [&] {
#if HAS_AMX
    if (use_amx) attend_levels<AmxDots, Cache>(x, spans, level_ends, levels);
    else
#endif
      attend_levels<VectorDots, Cache>(x, spans, level_ends, levels);
  });
}

}  // namespace

// Spans are runs of rows that walk one table together: [first row, last row, first chunk, last chunk, table offset].
// `levels` of them in order: all spans of a level are done before the next level begins. Every row's first span begins at
// chunk 0, and its last one ends at END.
extern "C" void attend(int heads, int kv_heads, int dim, int is_int8, int64_t block_bytes, int window, const uint16_t* q,
                       const uint8_t* k, const uint8_t* v, const int32_t* lengths, const int32_t* tables, const int32_t* spans,
                       const int32_t* level_ends, int levels, float* state, float* out) {
  const Step x{{heads, kv_heads, dim, block_bytes}, window, q, k, v, lengths, tables, state, out};
  if (is_int8) attend_step<Int8Cache>(x, spans, level_ends, levels);
  else attend_step<Bf16Cache>(x, spans, level_ends, levels);
}
