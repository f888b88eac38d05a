//! What the clients of a trace could say: whose session waits for a tool, and whose has ended.
//!
//! A trace has no names of sessions. A request goes on with one if it begins with nearly all that the last request of that
//! session had; else it begins one. So a branch that is not continued, as an agent leaves behind when it
//! makes its context shorter, is a session that ends.

use std::collections::HashMap;

use super::read::Trace;

/// How much of what a session had its next request begins with, in per cent: the last block changes, since it was not full.
const CONTINUED_PERCENT: usize = 90;

/// One statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Hint {
    /// Nobody goes on with these blocks.
    Finished(Vec<u32>),
    /// A session that used these goes on.
    Waiting { session: u32, blocks: Vec<u32> },
    /// It does not.
    Ended { session: u32 },
}

/// All of them, by the request behind which they are said.
#[derive(Clone, Debug, Default)]
pub(super) struct Hints(HashMap<u32, Vec<Hint>>);

impl Hints {
    pub(super) fn none() -> Hints {
        Hints::default()
    }

    /// What is said behind a request.
    pub(super) fn behind(&self, request: u32) -> &[Hint] {
        self.0.get(&request).map_or(&[], Vec::as_slice)
    }

    /// What sessions know of themselves: that they go on, and that they end. What another session has
    /// used as well is not theirs to end.
    pub(super) fn of_sessions(trace: &Trace, ends: bool, waits: bool) -> Hints {
        let sessions = sessions(trace);
        let mut last = HashMap::new();
        for (request, session) in (0_u32..).zip(&sessions) {
            last.insert(*session, request);
        }
        let mut users: Vec<Owner> = vec![Owner::Nobody; trace.distinct];
        let mut own: HashMap<u32, Vec<u32>> = HashMap::new();
        let mut hints = Hints::default();
        for ((number, request), session) in (0_u32..).zip(&trace.requests).zip(&sessions) {
            let blocks = trace.blocks_of(*request);
            for block in blocks {
                let user = &mut users[*block as usize];
                if *user == Owner::Nobody {
                    own.entry(*session).or_default().push(*block);
                }
                *user = user.joined_by(*session);
            }
            let said = hints.0.entry(number).or_default();
            let is_last = last.get(session) == Some(&number);
            if !is_last && waits {
                said.push(Hint::Waiting { session: *session, blocks: blocks.to_vec() });
            }
            if is_last {
                said.push(Hint::Ended { session: *session });
            }
            if is_last && ends {
                let mut own = own.remove(session).unwrap_or_default();
                own.retain(|block| users[*block as usize] == Owner::One(*session));
                said.push(Hint::Finished(own));
            }
        }
        hints
    }

    /// What nobody can know: which blocks are used for the last time. No hint of this kind is worth more.
    pub(super) fn of_the_future(trace: &Trace) -> Hints {
        let mut last = vec![0_u32; trace.distinct];
        for (number, request) in (0_u32..).zip(&trace.requests) {
            for block in trace.blocks_of(*request) {
                last[*block as usize] = number;
            }
        }
        let mut hints = Hints::default();
        for (number, request) in (0_u32..).zip(&trace.requests) {
            let blocks = trace.blocks_of(*request).iter().copied();
            let ended = blocks.filter(|block| last[*block as usize] == number).collect();
            hints.0.insert(number, vec![Hint::Finished(ended)]);
        }
        hints
    }
}

/// Who has used a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Nobody,
    One(u32),
    Several,
}

impl Owner {
    fn joined_by(self, session: u32) -> Owner {
        match self {
            Owner::Nobody => Owner::One(session),
            Owner::One(one) if one == session => self,
            Owner::One(_) | Owner::Several => Owner::Several,
        }
    }
}

/// The session of each request.
fn sessions(trace: &Trace) -> Vec<u32> {
    // Of each block the session that used it last, and of each session how much its last request had.
    let mut users: HashMap<u32, u32> = HashMap::new();
    let mut lengths: Vec<usize> = Vec::new();
    let mut sessions = Vec::new();
    for request in &trace.requests {
        let blocks = trace.blocks_of(*request);
        let known = blocks.iter().take_while(|block| users.contains_key(block)).count();
        let before = known.checked_sub(1).and_then(|last| users.get(&blocks[last]).copied());
        let goes_on = |session: &u32| known * 100 >= lengths[*session as usize] * CONTINUED_PERCENT;
        let session = before.filter(goes_on).unwrap_or_else(|| {
            lengths.push(0);
            u32::try_from(lengths.len() - 1).expect("fewer than the uses of blocks")
        });
        lengths[session as usize] = blocks.len();
        users.extend(blocks.iter().map(|block| (*block, session)));
        sessions.push(session);
    }
    sessions
}

#[cfg(test)]
mod tests {
    use super::super::read::trace_of;
    use super::*;

    #[test]
    fn a_session_goes_on_with_nearly_all_that_it_had() {
        let (long, other): (Vec<u64>, Vec<u64>) = ((1..=20).collect(), vec![1, 2, 103, 104]);
        let grown = [&long[..19], &[77, 78]].concat();
        let shorter = &long[..4];
        let trace =
            trace_of(&[&long, &other, &grown, &[other.as_slice(), &[105]].concat(), shorter]);
        assert_eq!(sessions(&trace), [0, 1, 0, 1, 2]);
    }

    #[test]
    fn only_what_nobody_else_used_is_finished() {
        let trace = trace_of(&[&[1, 2, 3], &[1, 2, 3, 4], &[1, 9, 8], &[1, 9, 8, 7]]);
        let hints = Hints::of_sessions(&trace, true, true);
        let (first, second) = (0, 1);
        let waiting = |session, blocks: &[u32]| Hint::Waiting { session, blocks: blocks.to_vec() };
        assert_eq!(hints.behind(0), [waiting(first, &[0, 1, 2])]);
        let ended =
            |session, blocks: &[u32]| [Hint::Ended { session }, Hint::Finished(blocks.to_vec())];
        // The second one has not begun.
        assert_eq!(hints.behind(1), ended(first, &[0, 1, 2, 3]));
        assert_eq!(hints.behind(2), [waiting(second, &[0, 4, 5])]);
        assert_eq!(hints.behind(3), ended(second, &[4, 5, 6]));
        let known = Hints::of_the_future(&trace);
        assert_eq!(known.behind(1), [Hint::Finished(vec![1, 2, 3])]);
    }
}
