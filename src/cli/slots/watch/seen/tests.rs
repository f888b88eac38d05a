use super::*;

const INTERVAL: Duration = Duration::from_secs(2);
const QUICK: Duration = Duration::from_millis(1);

/// A slot that does nothing; task and tokens, if it had a task.
fn idle(number: u64, turn: Option<(u64, u64)>) -> SlotState {
    let turn = turn.map(|(task, tokens)| Turn { task, tokens: Some(tokens) });
    SlotState { number, is_processing: false, turn, room: Some(1024) }
}

fn busy(number: u64, turn: Option<(u64, u64)>) -> SlotState {
    SlotState { is_processing: true, ..idle(number, turn) }
}

struct Case {
    seen: Seen,
    now: Instant,
}

impl Case {
    fn new() -> Self {
        Self { seen: Seen::new(INTERVAL), now: Instant::now() }
    }

    /// Whether the server is new, slots that have lost something, and those that are due.
    #[track_caller]
    fn check(&mut self, slots: &[SlotState], is_new: bool, lost: &[u64], due: &[u64]) {
        self.check_of(Some("a"), slots, is_new, lost, due);
    }

    #[track_caller]
    fn check_of(
        &mut self, marker: Option<&str>, slots: &[SlotState], is_new: bool, lost: &[u64],
        due: &[u64],
    ) {
        let news = self.seen.look(marker, slots);
        assert_eq!(news, News { is_new, lost: lost.to_vec() });
        assert_eq!(self.seen.due(slots, self.now), due);
    }

    fn save(&mut self, slot: u64, name: &str, took: Duration) {
        self.seen.saved(slot, Some(PathBuf::from(name)), took, self.now);
    }
}

#[test]
fn a_turn_is_saved_once_when_it_has_ended() {
    let mut case = Case::new();
    case.check(&[idle(0, None), idle(1, None)], true, &[], &[]);
    case.check(&[busy(0, Some((3, 10))), idle(1, None)], false, &[], &[]);
    case.check(&[busy(0, Some((3, 90))), idle(1, None)], false, &[], &[]);
    case.check(&[idle(0, Some((3, 100))), idle(1, None)], false, &[], &[0]);
    case.save(0, "first", QUICK);
    case.now += INTERVAL;
    case.check(&[idle(0, Some((3, 100))), idle(1, None)], false, &[], &[]);
    // A later turn, and one of another slot.
    case.check(&[idle(0, Some((9, 120))), idle(1, Some((8, 5)))], false, &[], &[0, 1]);
    // A slot that somebody else has changed without a task.
    case.save(0, "second", QUICK);
    case.save(1, "other", QUICK);
    case.now += INTERVAL;
    case.check(&[idle(0, Some((9, 40))), idle(1, Some((8, 5)))], false, &[], &[0]);
}

#[test]
fn what_has_no_tokens_is_not_saved() {
    let mut case = Case::new();
    case.check(&[idle(0, Some((3, 0)))], true, &[], &[]);
    assert!(case.seen.unsaved(&[idle(0, Some((3, 0))), idle(1, None)]).is_empty());
    // Servers that do not tell how many there are.
    let silent = SlotState { turn: Some(Turn { task: 3, tokens: None }), ..idle(0, None) };
    case.check(&[silent], false, &[], &[0]);
}

#[test]
fn saving_takes_a_tenth_of_the_time() {
    let mut case = Case::new();
    case.check(&[idle(0, Some((1, 10)))], true, &[], &[0]);
    case.save(0, "first", Duration::from_secs(4));
    let next = [idle(0, Some((2, 20)))];
    case.now += Duration::from_secs(35);
    case.check(&next, false, &[], &[]);
    assert_eq!(case.seen.unsaved(&next), [0]);
    case.now += Duration::from_secs(1);
    case.check(&next, false, &[], &[0]);
}

#[test]
fn what_fails_is_tried_less_and_less() {
    let mut case = Case::new();
    let slots = [idle(0, Some((1, 10))), idle(1, None)];
    case.check(&slots, true, &[], &[0]);
    let mut waits = Vec::new();
    for _ in 0..12 {
        case.seen.failed(0, QUICK, case.now);
        let begin = case.now;
        while case.seen.due(&slots, case.now).is_empty() {
            case.now += Duration::from_secs(1);
        }
        waits.push((case.now - begin).as_secs());
    }
    assert_eq!(waits, [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600]);
    // A mount that has come back, or another server, is a new beginning.
    case.seen.failed(0, QUICK, case.now);
    case.seen.forget_saved();
    case.check(&slots, false, &[], &[0]);
}

#[test]
fn what_was_lost_before_it_was_saved() {
    let mut case = Case::new();
    case.check(&[busy(0, Some((3, 90)))], true, &[], &[]);
    case.check(&[idle(0, Some((3, 0)))], false, &[0], &[]);
    case.check(&[idle(0, Some((3, 0)))], false, &[], &[]);
    // What was saved is not lost, and what went on has something else.
    case.check(&[idle(0, Some((4, 50)))], false, &[], &[0]);
    case.save(0, "first", QUICK);
    case.check(&[idle(0, Some((4, 0)))], false, &[], &[]);
    case.check(&[busy(0, Some((5, 50)))], false, &[], &[]);
    case.check(&[busy(0, Some((6, 0)))], false, &[], &[]);
}

#[test]
fn another_server() {
    let used = [idle(0, Some((9, 100)))];
    let check = |marker, slots: &[SlotState], is_new| {
        let mut case = Case::new();
        case.check(&used, true, &[], &[0]);
        case.save(0, "first", QUICK);
        case.seen.filled();
        case.now += INTERVAL;
        let changed: &[u64] = if is_new && slots[0].turn.is_some() { &[0] } else { &[] };
        case.check_of(marker, slots, is_new, &[], changed);
        assert_eq!(case.seen.is_filling_due(case.now), is_new);
    };
    check(Some("a"), &used, false);
    check(Some("b"), &used, true);
    check(None, &used, true);
    check(Some("a"), &[idle(0, None)], true);
    check(Some("a"), &[idle(0, Some((8, 100)))], true);
    check(Some("a"), &[used[0], idle(1, None)], true);
    let mut case = Case::new();
    case.check_of(None, &used, true, &[], &[0]);
    case.check_of(None, &used, false, &[], &[0]);
    case.seen.forget();
    case.check_of(None, &used, true, &[], &[0]);
}

#[test]
fn filling_is_tried_until_it_is_done() {
    let mut case = Case::new();
    case.check(&[idle(0, None)], true, &[], &[]);
    assert!(case.seen.is_filling_due(case.now));
    case.seen.not_filled(case.now);
    assert!(!case.seen.is_filling_due(case.now));
    case.now += INTERVAL;
    assert!(case.seen.is_filling_due(case.now));
    case.seen.not_filled(case.now);
    assert!(!case.seen.is_filling_due(case.now + INTERVAL));
    case.seen.filled();
    assert!(!case.seen.is_filling_due(case.now + RETRY_MAX));
}

#[test]
fn conversations_that_slots_have() {
    let mut case = Case::new();
    case.check(&[idle(0, Some((3, 100))), idle(1, None)], true, &[], &[0]);
    case.save(0, "first", QUICK);
    case.seen.restored(1, PathBuf::from("second"));
    assert_eq!(case.seen.held(), BTreeSet::from(["first", "second"].map(PathBuf::from)));
    // What a slot goes on with is not what it was restored from.
    case.check(&[idle(0, Some((3, 100))), busy(1, Some((7, 5)))], false, &[], &[]);
    assert_eq!(case.seen.held(), BTreeSet::from(["first"].map(PathBuf::from)));
}
