/* A token for each row of probabilities, by inversion; seeded_sampler.py compiles and calls it, and says the same in torch's operators. */
#include <stdint.h>

#define TOGETHER 4                   /* rows whose sums grow at the same time: each of its own has to wait for every addition */

/* Sums of `count` rows from left to right, in float64. */
static void add_up(const float *rows, int64_t words, int count, double *totals)
{
    double sum[TOGETHER] = {0};
    if (count == TOGETHER) {
        for (int64_t w = 0; w < words; w++)
            for (int r = 0; r < TOGETHER; r++)
                sum[r] += rows[r * words + w];
    } else {
        for (int r = 0; r < count; r++)
            for (int64_t w = 0; w < words; w++)
                sum[r] += rows[r * words + w];
    }
    for (int r = 0; r < count; r++)
        totals[r] = sum[r];
}

/* tokens[r]: the first word whose sum, itself included, exceeds shares[r] times the sum of all; the last word if none does.
 * probabilities: [rows][words]. */
void draw(const float *probabilities, const double *shares, int64_t *tokens, int64_t rows, int64_t words)
{
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < rows; first += TOGETHER) {
        const int count = rows - first < TOGETHER ? (int)(rows - first) : TOGETHER;
        double totals[TOGETHER];
        add_up(probabilities + first * words, words, count, totals);
        for (int r = 0; r < count; r++) {
            const float *row = probabilities + (first + r) * words;
            const double below = shares[first + r] * totals[r];
            double sum = 0;
            int64_t word = 0;
            for (; word < words - 1; word++) {
                sum += row[word];
                if (sum > below)
                    break;
            }
            tokens[first + r] = word;
        }
    }
}
