/* Products of few rows of float32 by a matrix of weights; products.py compiles and calls it.
 *
 * A general library copies all weights into a layout of its own first, which takes as long as the products of some ten rows. Here COLUMNS
 * rows of the weights at a time are transposed into the first cache, while the next ones are asked of memory, and multiplied by all rows.
 *
 * Each result is a sum of sums of `deep` products, added in order by fused operations: the very bits of MKL's products of many rows, by which
 * the learner computes, where `deep` is MKL's on this processor (products.py).
 */
#include <stdint.h>

#define LANES 8                      /* of a vector that is transposed */
#define COLUMNS (2 * LANES)
#define MOST_DEPTH 384
#ifdef __AVX512F__
#define WIDE COLUMNS                 /* of a vector that is multiplied */
#define ROWS 8                       /* of x at a time: as many sums as operations are under way */
#else
#define WIDE LANES
#define ROWS 6                       /* their sums are 12 of the 16 vector registers */
#endif
#define VECTORS (COLUMNS / WIDE)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4)));
#ifdef __clang__
#define SHUFFLE __builtin_shufflevector
#else
typedef int order __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (order){__VA_ARGS__})
#endif

/* COLUMNS rows of weights, [COLUMNS][stride] of which the first `depth`, to panel [depth][COLUMNS]. */
static void transpose(const float *weight, const float *next, int64_t stride, int64_t depth, float *panel)
{
    for (int c = 0; c < COLUMNS; c += LANES) {
        for (int64_t k = 0; k < depth; k += LANES) {
            const float *from = weight + c * stride + k;
            vec a[LANES], b[LANES];
            for (int i = 0; i < LANES; i++)
                a[i] = *(const vec *)(from + i * stride);
            if (k % 16 == 0)                                     /* one line of the cache */
                for (int i = 0; i < LANES; i++)
                    __builtin_prefetch(next + (c + i) * stride + k);
            for (int i = 0; i < LANES; i += 2) {
                b[i] = SHUFFLE(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
                b[i + 1] = SHUFFLE(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
            }
            for (int i = 0; i < LANES; i += 4)
                for (int j = i; j < i + 2; j++) {
                    a[j] = SHUFFLE(b[j], b[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
                    a[j + 2] = SHUFFLE(b[j], b[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
                }
            for (int i = 0; i < 4; i++) {
                *(vec *)(panel + (k + i) * COLUMNS + c) = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
                *(vec *)(panel + (k + i + 4) * COLUMNS + c) = SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
            }
        }
    }
}

/* `rows` rows of x by a panel; out has `columns` columns. */
static inline __attribute__((always_inline)) void add_products(const float *x, int64_t stride, const float *panel, int64_t depth, float *out,
                                                                int64_t columns, int rows, int is_first)
{
    wide sum[ROWS][VECTORS];
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < VECTORS; v++)
            sum[m][v] = (wide){0};
    for (int64_t k = 0; k < depth; k++)
        for (int v = 0; v < VECTORS; v++) {
            const wide weights = *(const wide *)(panel + k * COLUMNS + v * WIDE);
            for (int m = 0; m < rows; m++)
                sum[m][v] += x[m * stride + k] * weights;
        }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < VECTORS; v++) {
            wide *place = (wide *)(out + m * columns + v * WIDE);
            *place = is_first ? sum[m][v] : *place + sum[m][v];
        }
}

/* out [rows][columns] = x [rows][inner] times the transpose of weight [columns][inner]; columns are a multiple of COLUMNS, inner and
 * deep of LANES, deep is at most MOST_DEPTH. */
void multiply(const float *x, const float *weight, float *out, int64_t rows, int64_t inner, int64_t columns, int64_t deep)
{
#pragma omp parallel for schedule(static)
    for (int64_t column = 0; column < columns; column += COLUMNS) {
        float panel[MOST_DEPTH * COLUMNS] __attribute__((aligned(64)));
        for (int64_t k = 0; k < inner; k += deep) {
            const int64_t depth = inner - k < deep ? inner - k : deep;
            const float *here = weight + column * inner + k;
            const float *next = k + deep < inner ? here + deep : weight + (column + COLUMNS) * inner;
            transpose(here, next, inner, depth, panel);
            int64_t m = 0;
            for (; m + ROWS <= rows; m += ROWS)
                add_products(x + m * inner + k, inner, panel, depth, out + m * columns + column, columns, ROWS, k == 0);
            switch (rows - m) {
#define REST(n) case n: add_products(x + m * inner + k, inner, panel, depth, out + m * columns + column, columns, n, k == 0); break;
            REST(1) REST(2) REST(3) REST(4) REST(5)
#if ROWS > 6
            REST(6) REST(7)
#endif
            }
        }
    }
}
