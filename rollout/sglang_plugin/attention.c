/* Attention of each row's token to the tokens before it and to itself, over a paged cache of keys and values; attention_kernel.py compiles and
 * calls it. A row reads its own query and its own sequence's slots, nothing else of the batch.
 *
 * The compiler is told the model's shape: HEADS query heads over KEY_HEADS key heads, SIZE of a head, and ELEMENT, the type of the tensors
 * (FLOAT32, FLOAT16 or BFLOAT16).
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SHARED (HEADS / KEY_HEADS)   /* query heads that share a key head */
#define BLOCK 64                     /* keys between two corrections of the running maximum: their scores stay in the first cache */
#define FEW 256                      /* keys of all rows, about, that one thread meets sooner than others are awake */
#define AHEAD 12                     /* keys from now that are asked of memory: slots of a sequence lie apart, no processor guesses them */

#define FLOAT32 1
#define FLOAT16 2
#define BFLOAT16 3
#if ELEMENT == FLOAT32
typedef float element;
static inline double wide(element x) { return x; }
#elif ELEMENT == FLOAT16
typedef uint16_t element;            /* the bits: compilers convert _Float16 by a call for each, or don't know it */
static inline double wide(element x)
{
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13;            /* of a float, 2^112 times too small */
    bits |= (x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;        /* infinity and NaN */
    bits |= (uint32_t)(x & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value * 0x1p112;
}
#else
typedef uint16_t element;            /* the upper half of a float */
static inline double wide(element x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
#endif

static inline void fetch(const element *row)
{
    for (int byte = 0; byte < (int)(SIZE * sizeof(element)); byte += 64)
        __builtin_prefetch((const char *)row + byte);
}

/* One key head of one row. `keys` and `values` begin at this head's part of slot 0. */
static void attend_head(const element *restrict query, const element *restrict keys, const element *restrict values,
                        const int32_t *restrict slots, int64_t length, double scale, float *restrict out)
{
    double scaled[SHARED][SIZE], scores[SHARED][BLOCK], top[SHARED], total[SHARED], sum[SHARED][SIZE];
    for (int h = 0; h < SHARED; h++) {
        top[h] = -DBL_MAX;
        total[h] = 0;
        for (int d = 0; d < SIZE; d++) {
            scaled[h][d] = scale * wide(query[h * SIZE + d]);
            sum[h][d] = 0;
        }
    }
    for (int64_t first = 0; first < length; first += BLOCK) {
        const int count = length - first < BLOCK ? (int)(length - first) : BLOCK;
        for (int t = 0; t < count; t++) {
            const int64_t later = first + t + AHEAD;
            const element *restrict key = keys + (int64_t)slots[first + t] * KEY_HEADS * SIZE;
            fetch(values + (int64_t)slots[first + t] * KEY_HEADS * SIZE);
            if (later < length)
                fetch(keys + (int64_t)slots[later] * KEY_HEADS * SIZE);
            for (int h = 0; h < SHARED; h++) {
                double score = 0;
                for (int d = 0; d < SIZE; d++)
                    score += scaled[h][d] * wide(key[d]);
                scores[h][t] = score;
            }
        }
        for (int h = 0; h < SHARED; h++) {
            double largest = top[h];
            for (int t = 0; t < count; t++)
                largest = scores[h][t] > largest ? scores[h][t] : largest;
            const double shrink = exp(top[h] - largest);                 /* 0 in the first block */
            top[h] = largest;
            total[h] *= shrink;
            for (int d = 0; d < SIZE; d++)
                sum[h][d] *= shrink;
            for (int t = 0; t < count; t++)
                scores[h][t] = exp(scores[h][t] - largest);
            for (int t = 0; t < count; t++)
                total[h] += scores[h][t];
        }
        for (int t = 0; t < count; t++) {
            const element *restrict value = values + (int64_t)slots[first + t] * KEY_HEADS * SIZE;
            for (int h = 0; h < SHARED; h++)
                for (int d = 0; d < SIZE; d++)
                    sum[h][d] += scores[h][t] * wide(value[d]);
        }
    }
    for (int h = 0; h < SHARED; h++)
        for (int d = 0; d < SIZE; d++)
            out[h * SIZE + d] = (float)(sum[h][d] / total[h]);
}

/* query and out: [rows][HEADS][SIZE]; keys and values: [slots of the cache][KEY_HEADS][SIZE]; table: [requests][width], the slot of each
 * position; requests: [rows], each row's row of the table; lengths: [rows], of the sequence up to and with this token, at least 1. */
void attend(const element *query, const element *keys, const element *values, const int32_t *table, int64_t width,
            const int64_t *requests, const int64_t *lengths, int64_t rows, double scale, float *out)
{
#pragma omp parallel for collapse(2) schedule(static) if (rows * lengths[0] > FEW)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < KEY_HEADS; g++) {
            const int64_t head = (row * KEY_HEADS + g) * SHARED * SIZE;
            attend_head(query + head, keys + g * SIZE, values + g * SIZE, table + requests[row] * width, lengths[row], scale, out + head);
        }
}
