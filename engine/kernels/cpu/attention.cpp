// Paged attention over bf16 or int8 KV for one layer: every token of a step, prefill or decode, is one row with its block
// table and length. Keys are walked in chunks of 64 at the same absolute positions whoever shares them, and a row's
// arithmetic doesn't depend on the rows beside it: grouping changes the speed, never a bit of the result.
//
// Layouts (block_tokens is 16):
//   q    [rows][heads][dim]                 bf16, scaled, times log2 e
//   K, V                                    see chunk.h
//   state[rows][heads][dim + 32]            float32: unnormalized output, 16 sums of weights, the scores' origin
//
// The shared pass leaves its running state and the private pass starts from it, so the merge is exact and free.
#include "chunk.h"
#include "dots_amx.h"
#include "dots_vector.h"

namespace {

constexpr int REST = 32;      // of a row's state beside the output
constexpr int FEW_KEYS = 2048;  // of one span: they are read sooner than other threads would wake
constexpr int END = 1 << 30;  // last chunk of a span that goes as far as its rows do

struct Shape { int heads, kv_heads, dim; int64_t block_bytes; };  // K and V alike
struct Span { int first, last, from, to, table; };                // rows [first, last) over chunks [from, to)

struct Step {
  Shape s;
  const uint16_t* q;
  const uint8_t *k, *v;
  const int32_t *lengths, *tables;
  float *state, *out;
};

struct Rows {  // of a tile
  int row[MAX_ROWS], head[MAX_ROWS], length[MAX_ROWS], most;
};

// A row's walk begins at chunk 0: nothing is there yet.
inline void start(Tile& t, int dim, int r) {
  std::memset(t.mixed + r * dim, 0, dim * 4);
  std::memset(t.total[r], 0, sizeof t.total[r]);
  t.top[r] = -std::numeric_limits<float>::infinity();
}

inline void take(Tile& t, const Step& x, const Rows& of, bool is_first) {
  const int dim = x.s.dim;
  for (int r = 0; r < t.n; r++) {
    const int64_t at = (int64_t)of.row[r] * x.s.heads + of.head[r];
    const float* st = x.state + at * (dim + REST);
    std::memcpy(t.q + r * dim, x.q + at * dim, dim * 2);
    if (is_first) { start(t, dim, r); continue; }
    std::memcpy(t.mixed + r * dim, st, dim * 4);
    std::memcpy(t.total[r], st + dim, 64);
    t.top[r] = st[dim + 16];
  }
}

// The walk is over: the output is the mix over the sum of weights.
inline void finish(const Tile& t, const Step& x, const Rows& of) {
  const int dim = x.s.dim;
  for (int r = 0; r < t.n; r++) {
    const f32x16 scale = splat(1.f / sum(load(t.total[r])));
    float* out = x.out + ((int64_t)of.row[r] * x.s.heads + of.head[r]) * dim;
    for (int d = 0; d < dim; d += 16) store(out + d, load(t.mixed + r * dim + d) * scale);
  }
}

inline void give(const Tile& t, const Step& x, const Rows& of) {
  const int dim = x.s.dim;
  for (int r = 0; r < t.n; r++) {
    float* st = x.state + ((int64_t)of.row[r] * x.s.heads + of.head[r]) * (dim + REST);
    std::memcpy(st, t.mixed + r * dim, dim * 4);
    std::memcpy(st + dim, t.total[r], 64);
    st[dim + 16] = t.top[r];
  }
}

// The rows of a span for one kv head: tiles of rows share every load of a key, all tiles every chunk.
template <class Dots, class Cache> class Walk {
 public:
  explicit Walk(int dim) : dots(dim), cache(dim) {}

  void attend(const Step& x, const Span& span, int kv_head) {
    const int dim = x.s.dim;
    const int64_t head_at = kv_head * Cache::head_bytes(dim);
    const int32_t* table = x.tables + span.table;
    const int count = gather(x, span, kv_head);
    dots.begin(count > 1 ? Dots::ROWS : tiles[0].n);
    for (int c = span.from; c < span.to && c * CHUNK < most; c++) {
      const int widest = std::min(CHUNK, most - c * CHUNK), left = c + 1 < span.to ? most - (c + 1) * CHUNK : 0;
      Keys keys = cache.open(x.k + head_at, x.v + head_at, x.s.block_bytes, dim, table + c * CHUNK_BLOCKS, blocks_of(widest),
                             std::min(CHUNK_BLOCKS, blocks_of(std::max(0, left))), widest);
      for (int i = 0; i < count; i++) {
        const int visible = std::min(CHUNK, rows[i].most - c * CHUNK);
        if (visible <= 0) continue;
        int seen[MAX_ROWS];
        for (int r = 0; r < tiles[i].n; r++) seen[r] = std::min(CHUNK, rows[i].length[r] - c * CHUNK);
        keys.num_blocks = blocks_of(visible);
        dots.score(tiles[i], dim, keys);
        weigh<Cache::IS_SCALED>(tiles[i], dim, seen, keys);
        dots.mix(tiles[i], dim, keys, Cache::IS_SCALED ? CHUNK : visible);
        keys.is_cold = false;
      }
    }
    for (int i = 0; i < count; i++)
      if (span.to == END) finish(tiles[i], x, rows[i]); else give(tiles[i], x, rows[i]);
  }

 private:
  static int blocks_of(int tokens) { return (tokens + BLOCK - 1) / BLOCK; }

  // Takes the span's rows into tiles; returns how many.
  int gather(const Step& x, const Span& span, int kv_head) {
    const int group = x.s.heads / x.s.kv_heads, total = (span.last - span.first) * group;
    const int count = (total + Dots::ROWS - 1) / Dots::ROWS;
    if ((int)tiles.size() < count) { tiles.resize(count); rows.resize(count); }
    most = 0;
    for (int i = 0; i < count; i++) {
      Tile& t = tiles[i];
      Rows& of = rows[i];
      t.n = std::min(Dots::ROWS, total - i * Dots::ROWS);
      of.most = 0;
      for (int r = 0; r < t.n; r++) {
        const int at = i * Dots::ROWS + r;
        of.row[r] = span.first + at / group;
        of.head[r] = kv_head * group + at % group;
        of.length[r] = x.lengths[of.row[r]];
        of.most = std::max(of.most, of.length[r]);
      }
      take(t, x, of, span.from == 0);
      most = std::max(most, of.most);
    }
    return count;
  }

  Dots dots;
  Cache cache;
  std::vector<Tile> tiles;
  std::vector<Rows> rows;
  int most = 0;
};

template <class Dots, class Cache>
void attend_levels(const Step& x, const int32_t* spans, const int32_t* level_ends, int levels) {
  Walk<Dots, Cache> walk(x.s.dim);
  int begin = 0;
  for (int level = 0; level < levels; level++) {
    const int items = (level_ends[level] - begin) * x.s.kv_heads;
#pragma omp for schedule(dynamic, 1)
    for (int item = 0; item < items; item++) {
      const int32_t* p = spans + (int64_t)(begin + item / x.s.kv_heads) * 5;
      walk.attend(x, Span{p[0], p[1], p[2], p[3], p[4]}, item % x.s.kv_heads);
    }
    begin = level_ends[level];
  }
}

template <class Cache> void attend_step(const Step& x, const int32_t* spans, const int32_t* level_ends, int levels) {
#if HAS_AMX
  const bool use_amx = amx_allowed() && x.s.dim % 32 == 0;
#endif
  const bool is_big = levels > 1 || level_ends[0] > 1 || x.lengths[0] > FEW_KEYS;
#pragma omp parallel if (is_big)
  {
#if HAS_AMX
    if (use_amx) attend_levels<AmxDots, Cache>(x, spans, level_ends, levels);
    else
#endif
      attend_levels<VectorDots, Cache>(x, spans, level_ends, levels);
  }
}

}  // namespace

// Spans are runs of rows that walk one table together: [first row, last row, first chunk, last chunk, table offset].
// `levels` of them in order: all spans of a level are done before the next level begins. Every row's first span begins at
// chunk 0, and its last one ends at END.
extern "C" void attend(int heads, int kv_heads, int dim, int is_int8, int64_t block_bytes, const uint16_t* q, const uint8_t* k,
                       const uint8_t* v, const int32_t* lengths, const int32_t* tables, const int32_t* spans,
                       const int32_t* level_ends, int levels, float* state, float* out) {
  const Step x{{heads, kv_heads, dim, block_bytes}, q, k, v, lengths, tables, state, out};
  if (is_int8) attend_step<Int8Cache>(x, spans, level_ends, levels);
  else attend_step<Bf16Cache>(x, spans, level_ends, levels);
}
