/* What an engine does to its sequences, in C.
 *
 *     sequences MODEL
 *
 * MODEL has a sequence "chat" of 100 tokens. The program ends with the line of the first check that
 * fails. */
#include <kvfs.h>
#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "line %d: %s; %s\n", __LINE__, #condition,         \
                    kvfs_last_error());                                        \
            return 1;                                                          \
        }                                                                      \
    } while (0)

int main(int argc, char **argv) {
    kvfs_sequences *all = NULL;
    kvfs_sequence_ends ends = {.size = sizeof ends};
    kvfs_run runs[2];
    uint64_t count = 0;
    CHECK(argc == 2);
    CHECK(kvfs_sequences_open("/nowhere", &all) == KVFS_STATUS_MANIFEST && all == NULL);
    CHECK(kvfs_sequences_open(NULL, &all) == KVFS_STATUS_ARGUMENT);
    CHECK(kvfs_sequences_open(argv[1], &all) == KVFS_STATUS_OK);

    CHECK(kvfs_seq_ends(all, "chat", &ends) == KVFS_STATUS_OK);
    CHECK(ends.rows == 100 && ends.first == 0 && ends.end == 100);
    CHECK(kvfs_seq_ends(all, "other", &ends) == KVFS_STATUS_MISSING);
    CHECK(strstr(kvfs_last_error(), "other: no such sequence") != NULL);
    CHECK(kvfs_seq_rm(all, "a/b", 0, 1) == KVFS_STATUS_ARGUMENT);
    CHECK(kvfs_seq_rm(all, NULL, 0, 1) == KVFS_STATUS_ARGUMENT);
    CHECK(kvfs_seq_rm(all, "\xff", 0, 1) == KVFS_STATUS_ARGUMENT);
    CHECK(kvfs_seq_rm(NULL, "chat", 0, 1) == KVFS_STATUS_ARGUMENT);

    CHECK(kvfs_seq_cp(all, "chat", "half", 0, 50) == KVFS_STATUS_OK);
    CHECK(kvfs_seq_cp(all, "chat", "half", 0, 50) == KVFS_STATUS_EXISTS);
    CHECK(kvfs_seq_div(all, "half", 0, UINT64_MAX, 0) == KVFS_STATUS_ARGUMENT);
    CHECK(kvfs_seq_div(all, "half", 0, UINT64_MAX, 2) == KVFS_STATUS_OK);
    CHECK(kvfs_seq_ends(all, "half", &ends) == KVFS_STATUS_OK && ends.end == 25);
    CHECK(kvfs_seq_runs(all, "half", runs, 2, &count) == KVFS_STATUS_OK && count == 26);
    CHECK(runs[1].row == 1 && runs[1].tokens == 2 && runs[1].position == 0 && runs[1].shift == -1);
    CHECK(kvfs_seq_clear(all, "half") == KVFS_STATUS_OK);
    CHECK(kvfs_seq_ends(all, "half", &ends) == KVFS_STATUS_OK && ends.end == 0 && ends.rows == 0);

    CHECK(kvfs_seq_shift(all, "chat", 4, 36, "full") == KVFS_STATUS_OK);
    CHECK(kvfs_seq_runs(all, "chat", runs, 2, &count) == KVFS_STATUS_OK && count == 2);
    CHECK(runs[0].row == 0 && runs[0].tokens == 4 && runs[0].position == 0 && runs[0].shift == 0);
    CHECK(runs[1].row == 36 && runs[1].tokens == 64);
    CHECK(runs[1].position == 4 && runs[1].shift == -32);
    /* The same in two steps. */
    CHECK(kvfs_seq_cp(all, "full", "steps", 0, UINT64_MAX) == KVFS_STATUS_OK);
    CHECK(kvfs_seq_rm(all, "steps", 4, 36) == KVFS_STATUS_OK);
    CHECK(kvfs_seq_add(all, "steps", 36, UINT64_MAX, -32) == KVFS_STATUS_OK);
    CHECK(kvfs_seq_runs(all, "steps", NULL, 0, &count) == KVFS_STATUS_OK && count == 2);
    CHECK(kvfs_seq_rm(all, "full", 0, 0) == KVFS_STATUS_OK);
    CHECK(kvfs_seq_keep(all, "nobody") == KVFS_STATUS_MISSING);
    kvfs_sequences_free(all);
    kvfs_sequences_free(NULL);
    return 0;
}
