// Attention of the rows of rounds over pages of float32, for each request and query head by itself.

constexpr int64_t KEYS = 32;  // positions whose weights are computed at a time

struct Pages {
    const float *k, *v;  // [pages, page_size, kv_heads, head_dim]
    int64_t page_size, kv_heads, head_dim;

    int64_t token(const int32_t *table, int64_t position, int64_t kv_head) const {
        const int64_t index = (int64_t)table[position / page_size] * page_size + position % page_size;
        return (index * kv_heads + kv_head) * head_dim;
    }
};

INLINE float dot(const float *a, const float *b, int64_t size) {
    Vec parts = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) parts += load<Vec>(a + i) * load<Vec>(b + i);
    float total = sum(parts);
    for (; i < size; i++) total += a[i] * b[i];
    return total;
}

// One row of one head: out = softmax(scale * q . k) v over positions from `first` to `end` - 1, of which those from
// `suffix` on are seen if their bit in `mask` is set. Online softmax (arXiv 1805.02867), `KEYS` positions at a time.
static void attend_row(const float *q, const Pages &pages, const int32_t *table, int64_t kv_head, int64_t first,
                       int64_t suffix, int64_t end, uint64_t mask, float scale, float *out) {
    const int64_t size = pages.head_dim;
    float largest = -INFINITY, total = 0;
    for (int64_t i = 0; i < size; i++) out[i] = 0;
    for (int64_t begin = first; begin < end; begin += KEYS) {
        const int64_t count = end - begin < KEYS ? end - begin : KEYS;
        float scores[KEYS];
        float highest = -INFINITY;
        for (int64_t j = 0; j < KEYS; j++) {
            const int64_t position = begin + j;
            const bool seen = j < count && (position < suffix || (mask >> (position - suffix) & 1));
            scores[j] = seen ? scale * dot(q, pages.k + pages.token(table, position, kv_head), size) : -INFINITY;
            if (!(highest >= scores[j])) highest = std::isnan(highest) ? highest : scores[j];
        }
        if (highest == -INFINITY) continue;  // no position of these is seen
        const float before = largest;
        if (!(largest >= highest)) largest = std::isnan(largest) ? largest : highest;  // NaN if either is
        const float kept = exponential(broadcast(before - largest))[0];
        Vec parts = {};
        for (int64_t j = 0; j < KEYS; j += LANES) {
            const Vec weights = exponential(load<Vec>(scores + j) - largest);
            parts += weights;
            store(scores + j, weights);
        }
        total = total * kept + sum(parts);
        for (int64_t i = 0; i < size; i++) out[i] *= kept;
        for (int64_t j = 0; j < count; j++) {
            if (scores[j] == 0.0f) continue;  // also masked positions, whose values are arbitrary
            const float *v = pages.v + pages.token(table, begin + j, kv_head);
            for (int64_t i = 0; i < size; i++) out[i] += scores[j] * v[i];
        }
    }
    for (int64_t i = 0; i < size; i++) out[i] /= total;
}
