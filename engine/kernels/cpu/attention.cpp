// Paged attention over bf16 KV for one layer: every token of a step, prefill or decode, is one row with its block
// table and length. Keys are walked in chunks of 64 at the same absolute positions whoever shares them, and a row's
// arithmetic doesn't depend on the rows beside it: grouping changes the speed, never a bit of the result.
//
// Layouts (block_tokens is 16):
//   q    [rows][heads][dim]                 bf16, scaled, times log2 e
//   K    [block][kv head][dim / 2][16][2]   bf16: 16 tokens' pairs of dimensions fill one register
//   V    [block][kv head][8][dim][2]        bf16: pairs of tokens
//   state[rows][heads][dim + 32]            float32: unnormalized output, 16 sums of weights, the scores' origin
//
// The shared pass leaves its running state and the private pass starts from it, so the merge is exact and free.
#include "dots_amx.h"
#include "dots_vector.h"

namespace {

constexpr int REST = 32;      // of a row's state beside the output
constexpr int END = 1 << 30;  // last chunk of a span that goes as far as its rows do

struct Shape { int heads, kv_heads, dim; int64_t block_stride; };  // block_stride in bf16 elements, K and V alike
struct Span { int first, last, from, to, table; };                 // rows [first, last) over chunks [from, to)

struct Step {
  Shape s;
  const uint16_t *q, *k, *v;
  const int32_t *lengths, *tables;
  float *state, *out;
};

// A row's walk begins at chunk 0: nothing is there yet.
inline void start(Tile& t, int dim, int r) {
  std::memset(t.mixed + r * dim, 0, dim * 4);
  std::memset(t.total[r], 0, sizeof t.total[r]);
  t.top[r] = -std::numeric_limits<float>::infinity();
}

inline void take(Tile& t, const Step& x, const int* row, const int* head, bool is_first) {
  const int dim = x.s.dim;
  for (int r = 0; r < t.n; r++) {
    const int64_t at = (int64_t)row[r] * x.s.heads + head[r];
    const float* st = x.state + at * (dim + REST);
    std::memcpy(t.q + r * dim, x.q + at * dim, dim * 2);
    if (is_first) { start(t, dim, r); continue; }
    std::memcpy(t.mixed + r * dim, st, dim * 4);
    std::memcpy(t.total[r], st + dim, 64);
    t.top[r] = st[dim + 16];
  }
}

// The walk is over: the output is the mix over the sum of weights.
inline void finish(const Tile& t, const Step& x, const int* row, const int* head) {
  const int dim = x.s.dim;
  for (int r = 0; r < t.n; r++) {
    const f32x16 scale = splat(1.f / sum(load(t.total[r])));
    float* out = x.out + ((int64_t)row[r] * x.s.heads + head[r]) * dim;
    for (int d = 0; d < dim; d += 16) store(out + d, load(t.mixed + r * dim + d) * scale);
  }
}

inline void give(const Tile& t, const Step& x, const int* row, const int* head) {
  const int dim = x.s.dim;
  for (int r = 0; r < t.n; r++) {
    float* st = x.state + ((int64_t)row[r] * x.s.heads + head[r]) * (dim + REST);
    std::memcpy(st, t.mixed + r * dim, dim * 4);
    std::memcpy(st + dim, t.total[r], 64);
    st[dim + 16] = t.top[r];
  }
}

// The rows of a span for one kv head, in tiles of rows that share every load of a key.
template <class Dots> void attend_span(const Step& x, const Span& span, int kv_head, Tile& t, Dots& dots) {
  const int dim = x.s.dim, group = x.s.heads / x.s.kv_heads, total = (span.last - span.first) * group;
  const int32_t* table = x.tables + span.table;
  for (int at = 0; at < total; at += Dots::ROWS) {
    int row[MAX_ROWS], head[MAX_ROWS], length[MAX_ROWS], most = 0;
    t.n = std::min(Dots::ROWS, total - at);
    for (int r = 0; r < t.n; r++) {
      row[r] = span.first + (at + r) / group;
      head[r] = kv_head * group + (at + r) % group;
      length[r] = x.lengths[row[r]];
      most = std::max(most, length[r]);
    }
    dots.begin(t.n);
    take(t, x, row, head, span.from == 0);
    for (int c = span.from; c < span.to && c * CHUNK < most; c++) {
      const int widest = std::min(CHUNK, most - c * CHUNK), left = c + 1 < span.to ? most - (c + 1) * CHUNK : 0;
      int seen[MAX_ROWS];
      for (int r = 0; r < t.n; r++) seen[r] = std::min(CHUNK, length[r] - c * CHUNK);
      const Keys keys{x.k + (int64_t)kv_head * dim * BLOCK, x.v + (int64_t)kv_head * dim * BLOCK, x.s.block_stride,
                      table + c * CHUNK_BLOCKS, (widest + BLOCK - 1) / BLOCK,
                      std::min(CHUNK_BLOCKS, std::max(0, (left + BLOCK - 1) / BLOCK)), at == 0};
      dots.score(t, dim, keys);
      weigh(t, dim, seen);
      dots.mix(t, dim, keys, widest);
    }
    if (span.to == END) finish(t, x, row, head); else give(t, x, row, head);
  }
}

template <class Dots> void attend_levels(const Step& x, const int32_t* spans, const int32_t* level_ends, int levels) {
  Tile t;
  Dots dots(x.s.dim);
  int begin = 0;
  for (int level = 0; level < levels; level++) {
    const int items = (level_ends[level] - begin) * x.s.kv_heads;
#pragma omp for schedule(dynamic, 1)
    for (int item = 0; item < items; item++) {
      const int32_t* p = spans + (int64_t)(begin + item / x.s.kv_heads) * 5;
      attend_span(x, Span{p[0], p[1], p[2], p[3], p[4]}, item % x.s.kv_heads, t, dots);
    }
    begin = level_ends[level];
  }
}

}  // namespace

// Spans are runs of rows that walk one table together: [first row, last row, first chunk, last chunk, table offset].
// `levels` of them in order: all spans of a level are done before the next level begins. Every row's first span begins at
// chunk 0, and its last one ends at END.
extern "C" void attend(int heads, int kv_heads, int dim, int64_t block_stride, const uint16_t* q, const uint16_t* k,
                       const uint16_t* v, const int32_t* lengths, const int32_t* tables, const int32_t* spans,
                       const int32_t* level_ends, int levels, float* state, float* out) {
  const Step x{{heads, kv_heads, dim, block_stride}, q, k, v, lengths, tables, state, out};
#if HAS_AMX
  const bool use_amx = amx_allowed() && dim % 32 == 0;
#endif
#pragma omp parallel
  {
#if HAS_AMX
    if (use_amx) attend_levels<AmxDots>(x, spans, level_ends, levels);
    else
#endif
      attend_levels<VectorDots>(x, spans, level_ends, levels);
  }
}
