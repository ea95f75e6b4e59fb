// Attention of many queries: keys and values are packed by tiles, scores and results are matrix
// products. Included by attention.cc alone.
#pragma once

#include "attention_far.h"
#include "attention_float32.h"

namespace trtllm_lite {
namespace {

constexpr int64_t kRows = 384;  // queries (heads of a group x tokens) that share packed keys

// Tokens of one unit of work: all heads of a group together have at most about kRows queries, and there
// are units for several threads.
int64_t unit_tokens(const Attention& a) {
  const int64_t heads = std::max<int64_t>(1, a.batch * a.kv_heads);
  const int64_t pieces = std::max((a.seq * a.group() + kRows - 1) / kRows, (4 + heads - 1) / heads);
  return std::max<int64_t>(8, (a.seq + pieces - 1) / pieces);
}

template <class F>
using Scores = void (*)(const typename F::Item*, int64_t, const typename F::Item*, float*);
template <class F, int rows>
constexpr Scores<F> kScoresWide[4] = {F::template scores<rows, 1>, F::template scores<rows, 2>,
                                      F::template scores<rows, 3>, F::template scores<rows, 4>};
template <class F>
constexpr const Scores<F>* kScores[kHeight] = {kScoresWide<F, 1>, kScoresWide<F, 2>,
                                               kScoresWide<F, 3>, kScoresWide<F, 4>,
                                               kScoresWide<F, 5>, kScoresWide<F, 6>};

using Weights = void (*)(const Pair*, int64_t, const Pair*, Row*, float*, float*);
constexpr Weights kWeights[kHeight] = {Bfloat16Factors::weights<1>, Bfloat16Factors::weights<2>,
                                       Bfloat16Factors::weights<3>, Bfloat16Factors::weights<4>,
                                       Bfloat16Factors::weights<5>, Bfloat16Factors::weights<6>};

using FarWeights = void (FarKeys::*)(const Quad*, const float*, const float*, Row*, float*,
                                     float*) const;
constexpr FarWeights kFarWeights[kHeight] = {&FarKeys::weights<1>, &FarKeys::weights<2>,
                                             &FarKeys::weights<3>, &FarKeys::weights<4>,
                                             &FarKeys::weights<5>, &FarKeys::weights<6>};

// One unit of work: neighbouring tokens of batch row `b` from `first` on, and all heads that read key
// head `head`. `Factors` says what the factors of the products are held in, and multiplies them.
template <class Cache, class Factors>
class Unit {
 public:
  using Item = typename Factors::Item;

  Unit(const Attention& a, int64_t b, int64_t head, int64_t first)
      : a_(a), b_(b), head_(head), first_(first), depth_(Factors::depth(a.dim)) {
    tokens_ = std::min(unit_tokens(a), a.tokens(b) - first);
    rows_ = tokens_ * a.group();
  }

  void run(float* queries) {
    if (tokens_ <= 0) return;
    const int64_t start = a_.past(b_) + first_, end = start + tokens_;
    some_far_ = Factors::kRounds && a_.softcap == 0.0f && a_.dim <= kFarDim && end > kFar;
    take_rooms();
    take_queries(queries);
    for (int64_t t = first_key(a_, start) / kTile * kTile; t < end; t += kTile) {
      tile(t, std::min(kTile, end - t));
    }
    give_results();
  }

 private:
  void take_rooms() {
    const int64_t far = some_far_ ? rows_ * (quads(a_.dim) + 2) + FarKeys::items(a_.dim) : 0;
    const size_t row = a_.dim + depth_ + sizeof(Row) / sizeof(float);
    const size_t packed = Factors::key_items(a_.dim) + Factors::value_items(a_.dim);
    out_ = thread_buffer(rows_ * row + packed + kHeight * (kTile + 1) + far);
    state_ = reinterpret_cast<Row*>(out_ + rows_ * a_.dim);
    q_ = reinterpret_cast<Item*>(state_ + rows_);
    keys_ = q_ + rows_ * depth_;
    values_ = keys_ + Factors::key_items(a_.dim);
    scores_ = reinterpret_cast<float*>(values_ + Factors::value_items(a_.dim));
    factor_ = scores_ + kHeight * kTile;
    step_ = factor_ + kHeight;
    common_ = step_ + rows_;
    codes_ = reinterpret_cast<Quad*>(common_ + rows_);
  }

  FarKeys far_keys() const { return FarKeys(codes_ + rows_ * quads(a_.dim), a_.dim); }

  void take_queries(float* queries) {
    const int64_t group = a_.group();
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t s = first_ + r / group, h = head_ * group + r % group;
      const float* query = query_row(a_, queries, b_, s, h);
      Factors::pack_query(query, a_.dim, q_ + r * depth_);
      if (some_far_) {
        step_[r] = FarKeys::pack_query(query, a_.dim, codes_ + r * quads(a_.dim));
      }
      state_[r] = start_row(a_.past(b_) + s, a_.sinks != nullptr ? a_.sinks + h : nullptr);
    }
    std::memset(out_, 0, rows_ * a_.dim * sizeof(float));
  }

  // All rows meet keys [start, start + count); those that see none of them are left out.
  void tile(int64_t start, int64_t count) {
    const auto* values = cache_row<Cache>(a_, a_.v_cache, b_, head_, start);
    const Item* packed = Factors::template pack_values<Cache>(
        values, a_.v_scale + head_ * a_.dim, count, a_.dim, values_);
    near_here_ = far_here_ = false;
    finite_ = true;
    const int64_t unseen = std::max<int64_t>(0, start - a_.past(b_) - first_) * a_.group();
    for (int64_t r = unseen, rows; r < rows_; r += rows) {
      fetch(start + kTile, (r - unseen) / kHeight);
      rows = alike(r, start);
      weigh_rows(r, rows, start, count);
      mix(packed, r, rows, start, count);
    }
  }

  // Asks for a part of the tile that comes next, so that it is near when it is packed.
  void fetch(int64_t start, int64_t part) const {
    constexpr int64_t kLine = 64, kLines = 4, size = sizeof(typename Cache::Element);
    if (start + kTile > a_.capacity || (part + 1) * kLines * kLine > kTile * a_.dim * size) return;
    const auto* keys = cache_row<Cache>(a_, a_.k_cache, b_, head_, start);
    const auto* values = cache_row<Cache>(a_, a_.v_cache, b_, head_, start);
    for (int64_t i = part * kLines; i < (part + 1) * kLines; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(keys) + i * kLine, _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(values) + i * kLine, _MM_HINT_T1);
    }
  }

  // Whether row r takes this tile from codes. All rows of a position's tile do or do not, so that it
  // does not depend on how a prompt was cut.
  bool far(int64_t r, int64_t start) const {
    const int64_t tile = state_[r].position / kTile * kTile;
    return some_far_ && tile - start >= kFar && first_key(a_, tile + kTile - 1) <= start;
  }

  // How many rows from r on go together. Positions of so few lie in two tiles at most.
  int64_t alike(int64_t r, int64_t start) const {
    int64_t rows = std::min<int64_t>(kHeight, rows_ - r);
    while (far(r + rows - 1, start) != far(r, start)) --rows;
    return rows;
  }

  // Whether rows [r, r + rows) see all of a tile.
  bool whole(int64_t r, int64_t rows, int64_t start) const {
    return a_.softcap == 0.0f && state_[r].position + 1 - start >= kTile &&
           first_key(a_, state_[r + rows - 1].position) <= start;
  }

  // Of some rows, the last sees most keys.
  int64_t seen(int64_t last, int64_t start) const { return state_[last].position + 1 - start; }

  void weigh_rows(int64_t r, int64_t rows, int64_t start, int64_t count) {
    if (far(r, start)) {
      weigh_far(r, rows, start);
    } else {
      need_near(start, count);
      weigh_near(r, rows, start);
    }
    if (finite_) return;
    for (int64_t i = r; i < r + rows; ++i) state_[i].sum = _mm512_set1_ps(NAN);
  }

  void weigh_near(int64_t r, int64_t rows, int64_t start) {
    if constexpr (Factors::kRounds) {
      if (whole(r, rows, start)) {
        return kWeights[rows - 1](q_ + r * depth_, depth_, keys_, state_ + r, scores_, factor_);
      }
    }
    const int64_t wide = std::clamp<int64_t>((seen(r + rows - 1, start) + 15) / 16, 1, kTile / 16);
    kScores<Factors>[rows - 1][wide - 1](q_ + r * depth_, depth_, keys_, scores_);
    for (int64_t i = 0; i < rows; ++i) {
      Row& row = state_[r + i];
      factor_[i] = Factors::weigh(scores_ + i * kTile, a_.softcap * kLog2e,
                                  first_key(a_, row.position) - start, row.position + 1 - start, row);
    }
  }

  void weigh_far(int64_t r, int64_t rows, int64_t start) {
    if constexpr (Factors::kRounds) {
      FarKeys keys = far_keys();
      if (!far_here_) {
        if (span_ != start / kSpan) begin_span(keys, start / kSpan);
        finite_ &= keys.pack<Cache>(cache_row<Cache>(a_, a_.k_cache, b_, head_, start), key_scale());
        far_here_ = true;
      }
      (keys.*kFarWeights[rows - 1])(codes_ + r * quads(a_.dim), step_ + r, common_ + r, state_ + r,
                                    scores_, factor_);
    }
  }

  void begin_span(FarKeys& keys, int64_t span) {
    span_ = span;
    keys.begin_span<Cache>(cache_row<Cache>(a_, a_.k_cache, b_, head_, span * kSpan), key_scale());
    for (int64_t r = 0; r < rows_; ++r) common_[r] = keys.common(q_ + r * depth_);
  }

  void need_near(int64_t start, int64_t count) {
    if (near_here_) return;
    const auto* keys = cache_row<Cache>(a_, a_.k_cache, b_, head_, start);
    finite_ &= Factors::template pack_keys<Cache>(keys, key_scale(), count, a_.dim, keys_);
    near_here_ = true;
  }

  const float* key_scale() const { return a_.k_scale + head_ * a_.dim; }

  void mix(const Item* values, int64_t r, int64_t rows, int64_t start, int64_t count) {
    const int64_t dim = a_.dim, length = Factors::length(std::min(count, seen(r + rows - 1, start)));
    const auto* weights = reinterpret_cast<const Item*>(scores_);
    for (int64_t d = 0; d < dim; d += 64) {
      const int64_t wide = std::min<int64_t>(4, (dim - d) / 16);
      Factors::kProducts[rows - 1][wide - 1](weights, kTile, values + d, dim, length,
                                             out_ + r * dim + d, dim, factor_);
    }
  }

  void give_results() {
    const int64_t group = a_.group(), dim = a_.dim;
    for (int64_t r = 0; r < rows_; ++r) {
      float* to = a_.out + (b_ * a_.seq + first_ + r / group) * a_.heads * dim;
      to += (head_ * group + r % group) * dim;
      const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(state_[r].sum));
      for (int64_t d = 0; d < dim; d += 16) {
        _mm512_storeu_ps(to + d, _mm512_mul_ps(inverse, _mm512_loadu_ps(out_ + r * dim + d)));
      }
    }
  }

  const Attention& a_;
  const int64_t b_, head_, first_, depth_;
  int64_t tokens_, rows_;
  bool some_far_;                      // tiles are far for some rows
  bool near_here_, far_here_;          // how this tile's keys are packed
  bool finite_;                        // those that are
  int64_t span_ = -1;                  // whose mean is taken
  float* out_;        // [rows, dim], to be divided by the sums
  Row* state_;        // [rows]
  Item* q_;           // [rows, depth]
  Item* keys_;        // [depth, kTile]
  Item* values_;      // [length of a tile, dim]
  float* scores_;     // [kHeight, kTile], then weights: items from each row's start
  float* factor_;     // [kHeight] what earlier results are multiplied with
  float* step_;       // [rows] of far queries' codes
  float* common_;     // [rows] products with the mean of the span
  Quad* codes_;       // [rows, quads], then the far keys
};

}  // namespace
}  // namespace trtllm_lite
