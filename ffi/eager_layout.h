// Which elements of strided arrays lie on one address. Strides are in elements and not negative.
#pragma once

#include <cstdint>
#include <vector>

namespace cudnn_jax::layout {

// Whether two elements of one array lie on one address.
bool folds(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides);

// Whether an element of `a` is one of `b`, whose first element lies `offset` elements behind that of `a`.
// Exact for arrays of equal rank with equal strides, those of single axes aside; true for any others, and
// where strides are so irregular that the search takes too long.
bool meet(const std::vector<int64_t>& a_shape, const std::vector<int64_t>& a_strides,
          const std::vector<int64_t>& b_shape, const std::vector<int64_t>& b_strides, int64_t offset);

}  // namespace cudnn_jax::layout
