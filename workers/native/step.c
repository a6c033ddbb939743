// One step of the model: a list of phases that all threads walk through together (see pool.h).
#include "ops.h"
#include <time.h>

enum { EMBED, NORM, QKV, ROTATE, ATTEND, OUT, GATE_UP, DOWN, FINAL_NORM, LM_HEAD, NUM_KINDS };
enum { STORE, ADD, GATED };

typedef struct {
    const Step *step;
    Phase *phase;
    uint32_t generation;
    int thread;
    int64_t *times;
} Walker;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Runs body for each task that this thread claims, then waits until all are done.
#define RUN_PHASE(walker, kind, num_tasks, body)                                               \
    do {                                                                                       \
        int tasks_ = (num_tasks);                                                              \
        int64_t begin_ = (walker)->times ? now_ns() : 0;                                       \
        Phase *phase_ = (walker)->phase++;                                                     \
        for (int task; (task = phase_claim(phase_, (walker)->generation, tasks_)) >= 0;) {     \
            body;                                                                              \
            phase_finish(phase_);                                                              \
        }                                                                                      \
        phase_wait(phase_, (walker)->generation, tasks_);                                      \
        if ((walker)->times) (walker)->times[kind] += now_ns() - begin_;                       \
    } while (0)

// Where a product's outputs go: float32 set or added to, or the gated activation in bfloat16.
typedef struct {
    int mode;
    float *out;
    bf16 *act;
    long stride;
} Target;

// block: [rows][block_stride] sums of the 32 columns of n_block.
static void finish_block(const Step *s, const Packed *w, Target to, int n_block, const float *block, int block_stride,
                         int first_row, int rows) {
    int column = n_block * BLOCK_N;
    for (int r = 0; r < rows; r++, block += block_stride) {
        F16 left = f16_load(block), right = f16_load(block + 16);
        if (to.mode == GATED) {
            F16 gate = s->model->gelu ? f16_gelu_tanh(left) : f16_silu(left);
            bf16_store(to.act + (first_row + r) * to.stride + n_block * 16, gate * right);
            continue;
        }
        if (w->bias) left += f16_load(w->bias + column), right += f16_load(w->bias + column + 16);
        float *target = to.out + (first_row + r) * to.stride + column;
        if (to.mode == ADD) left += f16_load(target), right += f16_load(target + 16);
        f16_store(target, left);
        f16_store(target + 16, right);
    }
}

// One task of a product: `width` column blocks, all rows.
static void product_task(const Step *s, const Packed *w, int task, int width, const bf16 *a, long a_stride, int rows,
                         Target to) {
    _Alignas(64) float sums[CHUNK_ROWS * BLOCK_N];
    int n = task * width, end = n + width < w->n_blocks ? n + width : w->n_blocks;
    if (rows <= FEW_ROWS)
        for (; n + 2 <= end; n += 2) {
            product_wide(w, 2 * n, a, a_stride, rows, sums);
            finish_block(s, w, to, n, sums, 16 * WIDE_TILES, 0, rows);
            finish_block(s, w, to, n + 1, sums + BLOCK_N, 16 * WIDE_TILES, 0, rows);
        }
    for (; n < end; n++)
        for (int at = 0; at < rows; at += CHUNK_ROWS) {
            int count = rows - at < CHUNK_ROWS ? rows - at : CHUNK_ROWS;
            product_chunked(w, n, a + at * a_stride, a_stride, count, sums);
            finish_block(s, w, to, n, sums, BLOCK_N, at, count);
        }
}

// Rows per task of the small operations. Neighbours in a prompt write to the same cache lines of K, so one thread takes
// them together; rows of a decode batch lie apart.
static int rows_per_task(int rows) { return rows >= 64 ? 16 : 1; }
static int row_tasks(int rows) { return (rows + rows_per_task(rows) - 1) / rows_per_task(rows); }

#define FOR_ROWS_OF_TASK(rows, body)                                                                    \
    for (int row = task * rows_per_task(rows), end_ = row + rows_per_task(rows); row < end_ && row < (rows); row++) body

static int tasks_of(const Packed *w, int width) { return (w->n_blocks + width - 1) / width; }

static void run_layer(Walker *walk, int index) {
    const Step *s = walk->step;
    const Buffers *f = &s->buffers;
    const Layer *l = s->model->layers + index, *before = index ? l - 1 : 0;
    int tokens = s->batch->num_tokens;
    RUN_PHASE(walk, NORM, row_tasks(tokens),
              FOR_ROWS_OF_TASK(tokens, norm_row(s, row, before ? before->after_mlp_norm : 0, l->input_norm)));
    RUN_PHASE(walk, QKV, tasks_of(&l->qkv, 2),
              product_task(s, &l->qkv, task, 2, f->normed, f->normed_stride, tokens, (Target){STORE, f->qkv, 0, f->qkv_stride}));
    RUN_PHASE(walk, ROTATE, row_tasks(tokens), FOR_ROWS_OF_TASK(tokens, rotate_and_store(s, index, row)));
    attention_configure();
    RUN_PHASE(walk, ATTEND, f->num_groups * s->model->num_kv_heads, attend(s, index, task));
    amx_configure();
    int sandwich = l->after_attention_norm != 0;
    Target added = sandwich ? (Target){STORE, f->qkv, 0, f->qkv_stride} : (Target){ADD, f->hidden, 0, f->hidden_stride};
    RUN_PHASE(walk, OUT, tasks_of(&l->out, 2),
              product_task(s, &l->out, task, 2, f->attended, f->query_stride, tokens, added));
    RUN_PHASE(walk, NORM, row_tasks(tokens),
              FOR_ROWS_OF_TASK(tokens, norm_row(s, row, l->after_attention_norm, l->mlp_norm)));
    RUN_PHASE(walk, GATE_UP, tasks_of(&l->gate_up, 4),
              product_task(s, &l->gate_up, task, 4, f->normed, f->normed_stride, tokens, (Target){GATED, 0, f->act, f->act_stride}));
    RUN_PHASE(walk, DOWN, tasks_of(&l->down, 2),
              product_task(s, &l->down, task, 2, f->act, f->act_stride, tokens, added));
}

static void final_norm_row(const Step *s, int sample) {
    const Model *m = s->model;
    int token = s->batch->sample_tokens[sample];
    const Layer *last = m->layers + m->num_layers - 1;
    norm_row(s, token, last->after_mlp_norm, 0);
    norm_to_bf16(s->buffers.hidden + token * s->buffers.hidden_stride, m->final_norm, m->hidden,
                 (int)s->buffers.hidden_stride, m->eps, s->buffers.normed + sample * s->buffers.normed_stride);
}

static void run_step(Pool *pool, uint32_t generation, int thread) {
    const Step *s = pool->step;
    Walker walk = {s, pool->phases, generation, thread, thread == 0 ? s->phase_ns : 0};
    const Batch *b = s->batch;
    const Model *m = s->model;
    unsigned control = flush_tiny_numbers();
    amx_configure();
    RUN_PHASE(&walk, EMBED, row_tasks(b->num_tokens), FOR_ROWS_OF_TASK(b->num_tokens, embed(s, row)));
    for (int i = 0; i < m->num_layers; i++) run_layer(&walk, i);
    RUN_PHASE(&walk, FINAL_NORM, b->num_samples, final_norm_row(s, task));
    if (b->num_samples)
        RUN_PHASE(&walk, LM_HEAD, tasks_of(&m->lm_head, 8),
                  product_task(s, &m->lm_head, task, 8, s->buffers.normed, s->buffers.normed_stride, b->num_samples,
                               (Target){STORE, b->logits, 0, b->logits_stride}));
    amx_release();
    restore_control(control);
}

// Query tokens of one sequence that follow one another are attended together, so that they share the reads of K and V.
static void make_groups(Step *s) {
    const Batch *b = s->batch;
    int share = s->model->num_heads / s->model->num_kv_heads, rows = most_query_rows(s->model);
    int most = share < rows ? rows / share : 1, count = 0;
    for (int t = 0; t < b->num_tokens; t++) {
        if (b->slot_blocks[t] < 0) continue;
        Group *last = s->buffers.groups + count - 1;
        if (count && last->count < most && last->first + last->count == t && b->row_of[t] == b->row_of[last->first])
            last->count++;
        else
            s->buffers.groups[count++] = (Group){t, 1};
    }
    s->buffers.num_groups = count;
}

Pool *ww_open(int num_threads) { return amx_allow() ? pool_open(num_threads, run_step) : NULL; }
void ww_close(Pool *pool) { pool_close(pool); }

int ww_step(Pool *pool, Step *step) {
    int phases = 8 * step->model->num_layers + 3;
    if (phases > MAX_PHASES) return -1;
    make_groups(step);
    pool_run(pool, step, phases);
    return 0;
}

// A whole product on the calling thread: what the self-test looks at.
void ww_product(const Packed *w, const bf16 *a, long a_stride, int rows, float *out, long out_stride) {
    unsigned control = flush_tiny_numbers();
    amx_configure();
    product_task(0, w, 0, w->n_blocks, a, a_stride, rows, (Target){STORE, out, 0, out_stride});
    amx_release();
    restore_control(control);
}

// Reads memory in four streams, as the products do: what the benchmark calls the machine's read rate.
int ww_read(const char *memory, long bytes) {
    I16 a = i16_set(0), b = a, c = a, d = a;
    long quarter = bytes / 256 * 64;
    for (long i = 0; i < quarter; i += 64) {
        a ^= i16_load(memory + i);
        b ^= i16_load(memory + quarter + i);
        c ^= i16_load(memory + 2 * quarter + i);
        d ^= i16_load(memory + 3 * quarter + i);
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[7];
}

void ww_pack(const bf16 *source, int k, const int32_t *order, int n_blocks, int k_blocks, bf16 *target) {
    pack_weights(source, k, order, n_blocks, k_blocks, target);
}
