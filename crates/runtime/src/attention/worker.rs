//! One thread's share of a call.

use std::f64::consts::LN_2;
use std::ops::Range;

use super::Partials;
use super::kernel::{Logits, Rows, SUM_LANES, Scratch, Tile, Work};
use super::mass::{Recorder, output_row};
use super::plan::{Place, Plan};
use super::state::EMPTY_M;

/// What a thread gathers: rows are `[num_kv_heads, num_queries, group]`, in units of log2.
pub(super) struct Worker<'p, 'a> {
    plan: &'p Plan<'a>,
    o: Vec<f32>,
    m: Vec<f32>,
    l: Vec<[f32; SUM_LANES]>,
    logits: Logits,
    scratch: Box<Scratch>,
    recorder: Option<&'p mut Recorder>,
}

impl<'p, 'a> Worker<'p, 'a> {
    pub(super) fn new(plan: &'p Plan<'a>, recorder: Option<&'p mut Recorder>) -> Self {
        let rows = plan.num_queries() * plan.shape.num_qo_heads();
        Self {
            plan,
            o: vec![0.0; rows * plan.shape.v_head_dim()],
            m: vec![EMPTY_M; rows],
            l: vec![[0.0; SUM_LANES]; rows],
            logits: Logits::new(),
            scratch: Box::new(Scratch::new(plan.shape.v_head_dim())),
            recorder,
        }
    }

    /// Attends to consecutive units.
    pub(super) fn run(mut self, units: Range<usize>) -> Partials {
        let plan = self.plan;
        // The last query of a causal chunk sees the most.
        let Some(last) = plan.num_queries().checked_sub(1) else { return self.partials() };
        // Of the current unit and the next one, and of queries that see less of the current one.
        let [mut current, mut next, mut part] = std::array::from_fn(|_| Box::new(Tile::empty()));
        let tile_of = |unit: usize, tile: &mut Tile<'a>| {
            let (head, place) = plan.unit(unit);
            plan.tile(head, place, last, tile);
        };
        if !units.is_empty() {
            tile_of(units.start, &mut next);
        }
        for unit in units.clone() {
            let (head, place) = plan.unit(unit);
            std::mem::swap(&mut current, &mut next);
            if unit + 1 < units.end {
                tile_of(unit + 1, &mut next);
            }
            let mut query = 0;
            while query <= last {
                let queries = plan.run_of_queries(place, query);
                query = queries.end;
                if queries.end > last {
                    // Only the last queries prefetch, as their tile is the one next in order.
                    let next = (unit + 1 < units.end).then_some(&*next);
                    self.attend((head, place), &current, next, queries);
                } else {
                    plan.tile(head, place, queries.start, &mut part);
                    self.attend((head, place), &part, None, queries);
                }
            }
            self.end_head(plan.ends_head(unit, &units));
        }
        self.partials()
    }

    /// What was recorded of a head is added up if this thread has seen all of it.
    fn end_head(&mut self, whole: Option<bool>) {
        let (Some(recorder), Some(is_whole)) = (&mut self.recorder, whole) else { return };
        if is_whole {
            let sum = |lanes: &[f32; SUM_LANES]| lanes.iter().copied().map(f64::from).sum();
            recorder
                .finish_head(self.plan.kernel, |row| (f64::from(self.m[row]), sum(&self.l[row])));
        } else {
            recorder.leave_head();
        }
    }

    /// Adds a tile to the rows of some queries that see the same of it.
    fn attend(
        &mut self, unit: (usize, &Place), tile: &Tile<'_>, mut next: Option<&Tile<'_>>,
        queries: Range<usize>,
    ) {
        if tile.len == 0 {
            return;
        }
        let (plan, (head, place)) = (self.plan, unit);
        let shape = plan.shape;
        let (group, dim, v_dim) = (shape.group(), shape.head_dim(), shape.v_head_dim());
        plan.logits(place, tile, queries.start, &mut self.logits);
        let (q, slopes) = (plan.q(head, place.block), plan.slopes(head));
        let head_rows = head * plan.num_queries() * group;
        let rows = queries.start * group..queries.end * group;
        // Passes of nearly equal size, because each converts K and V anew.
        let passes = rows.len().div_ceil(plan.kernel.rows_max());
        let step = rows.len().div_ceil(passes);
        for first in rows.clone().step_by(step) {
            let count = step.min(rows.end - first);
            let row = head_rows + first;
            let in_group = first - rows.start;
            let work = Work { tile, next, logits: &self.logits, head_dim: dim, v_head_dim: v_dim };
            plan.kernel.attend(
                plan.blocks[place.block].dtype,
                &work,
                Rows {
                    q: &q[first * dim..][..count * dim],
                    o: &mut self.o[row * v_dim..][..count * v_dim],
                    m: &mut self.m[row..][..count],
                    l: &mut self.l[row..][..count],
                    slopes: slopes.get(in_group..in_group + count).unwrap_or_default(),
                },
                &mut self.scratch,
            );
            if let Some(recorder) = &mut self.recorder {
                let m = &self.m[row..][..count];
                let weights = &self.scratch.weights;
                let block_start = place.block_start;
                recorder.record(plan.kernel, (row, m), block_start, tile.tokens(), weights);
            }
            next = None;
        }
    }

    /// From log2 and KV heads to what callers see.
    #[allow(clippy::cast_possible_truncation, reason = "f32 is what the partials hold")]
    fn partials(self) -> Partials {
        let plan = self.plan;
        let v_dim = plan.shape.v_head_dim();
        let mut partials = Partials::empty(plan.shape, plan.num_queries());
        for row in 0..self.m.len() {
            let out = output_row(&partials, row);
            let l: f32 = self.l[row].iter().sum();
            if self.m[row] == EMPTY_M && l == 0.0 {
                continue;
            }
            let m = f64::from(self.m[row]) * LN_2;
            partials.m[out] = m as f32;
            // What rounding took from m.
            let factor = (m - f64::from(partials.m[out])).exp() as f32;
            partials.l[out] = l * factor;
            let o = &self.o[row * v_dim..][..v_dim];
            for (to, from) in partials.o[out * v_dim..][..v_dim].iter_mut().zip(o) {
                *to = from * factor;
            }
        }
        partials
    }
}
