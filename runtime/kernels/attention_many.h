// Attention of many queries: keys and values are packed by tiles, scores and results are matrix
// products. Included by attention.cc alone.
#pragma once

#include "attention_softmax.h"

namespace trtllm_lite {
namespace {

constexpr int64_t kRows = 192;    // queries (heads of a group x tokens) that share packed keys
constexpr int64_t kBlock = 12;    // of them, those that meet a tile together: their scores stay near

// Tokens of one unit of work, so that all heads of a group together have about kRows queries.
int64_t unit_tokens(const Attention& a) { return std::max<int64_t>(8, kRows / a.group()); }

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
    take_rooms();
    take_queries(queries);
    const int64_t start = a_.past(b_) + first_, end = start + tokens_;
    for (int64_t t = first_key(a_, start) / kTile * kTile; t < end; t += kTile) {
      tile(t, std::min(kTile, end - t));
    }
    give_results();
  }

 private:
  void take_rooms() {
    const size_t row = a_.dim + depth_ + sizeof(Row) / sizeof(float);
    const size_t packed = Factors::key_items(a_.dim) + Factors::value_items(a_.dim);
    out_ = thread_buffer(rows_ * row + packed + kBlock * (kTile + 1));
    state_ = reinterpret_cast<Row*>(out_ + rows_ * a_.dim);
    q_ = reinterpret_cast<Item*>(state_ + rows_);
    keys_ = q_ + rows_ * depth_;
    values_ = keys_ + Factors::key_items(a_.dim);
    scores_ = reinterpret_cast<float*>(values_ + Factors::value_items(a_.dim));
    factor_ = scores_ + kBlock * kTile;
  }

  void take_queries(float* queries) {
    const int64_t group = a_.group();
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t s = first_ + r / group, h = head_ * group + r % group;
      Factors::pack_query(query_row(a_, queries, b_, s, h), a_.dim, q_ + r * depth_);
      state_[r] = start_row(a_.past(b_) + s, a_.sinks != nullptr ? a_.sinks + h : nullptr);
    }
    std::memset(out_, 0, rows_ * a_.dim * sizeof(float));
  }

  // All rows meet keys [start, start + count); those that see none of them are left out.
  void tile(int64_t start, int64_t count) {
    const auto* keys = cache_row<Cache>(a_, a_.k_cache, b_, head_, start);
    const auto* values = cache_row<Cache>(a_, a_.v_cache, b_, head_, start);
    Factors::template pack_keys<Cache>(keys, a_.k_scale + head_ * a_.dim, count, a_.dim, keys_);
    const Item* packed = Factors::template pack_values<Cache>(
        values, a_.v_scale + head_ * a_.dim, count, a_.dim, values_);
    const int64_t unseen = std::max<int64_t>(0, start - a_.past(b_) - first_) * a_.group();
    for (int64_t top = unseen / kHeight * kHeight; top < rows_; top += kBlock) {
      const int64_t end = std::min(rows_, top + kBlock);
      for (int64_t r = top; r < end; r += kHeight) score(r, top, start);
      for (int64_t r = top; r < end; ++r) factor_[r - top] = weigh(r, top, start);
      for (int64_t r = top; r < end; r += kHeight) mix(packed, r, top, start, count);
    }
  }

  int64_t height(int64_t r) const { return std::min<int64_t>(kHeight, rows_ - r); }

  // Of a register tile's rows, the last sees most keys.
  int64_t seen(int64_t r, int64_t start) const {
    return state_[r + height(r) - 1].position + 1 - start;
  }

  void score(int64_t r, int64_t top, int64_t start) {
    const int64_t wide = std::clamp<int64_t>((seen(r, start) + 15) / 16, 1, kTile / 16);
    Factors::kProducts[height(r) - 1][wide - 1](q_ + r * depth_, depth_, keys_, kTile, depth_,
                                                scores_ + (r - top) * kTile, kTile, nullptr);
  }

  float weigh(int64_t r, int64_t top, int64_t start) {
    const int64_t to = state_[r].position + 1 - start;
    const int64_t from = first_key(a_, state_[r].position) - start;
    const bool whole = a_.softcap == 0.0f && from <= 0 && to >= kTile;
    const auto weigh = whole ? Factors::template weigh<true> : Factors::template weigh<false>;
    return weigh(scores_ + (r - top) * kTile, a_.softcap * kLog2e, from, to, state_[r]);
  }

  void mix(const Item* values, int64_t r, int64_t top, int64_t start, int64_t count) {
    const int64_t dim = a_.dim, length = Factors::length(std::min(count, seen(r, start)));
    const auto* weights = reinterpret_cast<const Item*>(scores_ + (r - top) * kTile);
    for (int64_t d = 0; d < dim; d += 64) {
      const int64_t wide = std::min<int64_t>(4, (dim - d) / 16);
      Factors::kProducts[height(r) - 1][wide - 1](weights, kTile, values + d, dim, length,
                                                  out_ + r * dim + d, dim, factor_ + r - top);
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
  float* out_;        // [rows, dim], to be divided by the sums
  Row* state_;        // [rows]
  Item* q_;           // [rows, depth]
  Item* keys_;        // [depth, kTile]
  Item* values_;      // [length of a tile, dim]
  float* scores_;     // [kBlock, kTile], then weights: items from each row's start
  float* factor_;     // [kBlock] what earlier results are multiplied with
};

}  // namespace
}  // namespace trtllm_lite
