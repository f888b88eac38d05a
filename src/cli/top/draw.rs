//! The picture: sections of lines that share the height there is, drawn into any area.
//!
//! What tells that something is wrong comes first and is never left out for what does not.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style as Look};
use ratatui::text::{Line, Span};

use super::figures::{Figures, Flow, LastOpens, Requests, TierFigures};
use super::layout::{Section, side_by_side, stacked};
use super::words;
use crate::cli::duration::age;
use crate::cli::history::Event;
use crate::cli::output::{bytes, grouped};
use crate::cli::style::{Paint, Style};
use crate::page::printable;

/// Two columns of sections are beside each other from this width on.
const WIDE_COLUMNS: u16 = 78;
const LEFT_COLUMNS: usize = 38;
const BAR_CHARACTERS: usize = 8;
/// What a remote says of itself may be long.
const MESSAGE_LINES_MAX: usize = 2;
const EVENT_ROWS_MAX: usize = 20;
const PERCENT_COLUMNS: usize = 6;

/// What is shown.
#[derive(Debug)]
pub(super) struct View {
    /// Shown where there are no figures yet.
    pub(super) place: String,
    pub(super) figures: Option<Figures>,
    /// The last one at the end.
    pub(super) events: VecDeque<Event>,
    /// What keeps the figures from being those of now.
    pub(super) notice: Option<String>,
    /// How often it is drawn anew; `None` where it stays.
    pub(super) interval: Option<Duration>,
    pub(super) style: Style,
}

impl View {
    /// Draws as much as fits.
    pub(super) fn draw(&self, area: Rect, buffer: &mut Buffer) {
        let area = area.intersection(buffer.area);
        let width = usize::from(area.width);
        let mut rows = self.head(width);
        let left = usize::from(area.height).saturating_sub(rows.len());
        if let Some(figures) = &self.figures {
            if area.width >= WIDE_COLUMNS {
                rows.extend(self.wide(figures, width, left));
            } else {
                rows.extend(stacked(self.sections(figures, width), left));
            }
        }
        for (y, row) in (area.y..area.bottom()).zip(&rows) {
            buffer.set_line(area.x, y, row, area.width);
        }
    }

    /// Lines that all of it takes where nothing is left out.
    pub(super) fn height(&self, width: u16) -> u16 {
        let columns = usize::from(width);
        let head = self.head(columns).len();
        let rest = self.figures.as_ref().map_or(0, |figures| match width {
            WIDE_COLUMNS.. => self.wide(figures, columns, usize::MAX).len(),
            _ => stacked(self.sections(figures, columns), usize::MAX).len(),
        });
        u16::try_from(head + rest).unwrap_or(u16::MAX)
    }

    fn painted(&self, paint: Paint, text: impl Into<String>) -> Span<'static> {
        Span::styled(text.into(), look(paint, self.style))
    }

    fn title(&self, text: impl Into<String>) -> Line<'static> {
        Line::from(self.painted(Paint::Heading, text))
    }

    /// Which mount, how it is, and whether that is still so.
    fn head(&self, width: usize) -> Vec<Line<'static>> {
        let figures = self.figures.as_ref();
        let place = figures.map_or(self.place.as_str(), |figures| figures.mountpoint.as_str());
        let mut rows = Vec::new();
        let mut first = Vec::new();
        if let Some(figures) = figures {
            let paint = match figures.state.as_str() {
                "ok" | "read-only media" => Paint::Good,
                "degraded" => Paint::Warning,
                _ => Paint::Bad,
            };
            first.push(self.painted(paint, printable(figures.state.chars())));
            first.push(Span::raw("  "));
        }
        let used: usize = first.iter().map(Span::width).sum();
        first.push(self.painted(Paint::Heading, words::path(place, width.saturating_sub(used))));
        if let Some(seconds) = figures.and_then(|figures| figures.uptime_seconds) {
            first.push(Span::raw(format!("  up for {}", age(seconds))));
        }
        let hint =
            self.interval.map(|interval| format!("each {}  q ends", interval_text(interval)));
        let used: usize = first.iter().map(Span::width).sum();
        if let Some(hint) = hint.filter(|hint| used + 2 + hint.len() <= width) {
            first.push(Span::raw(format!("{hint:>room$}", room = width - used)));
        }
        rows.push(Line::from(first));
        let reasons = figures.into_iter().flat_map(|figures| &figures.state_reasons);
        let reasons = reasons.map(|reason| (reason, Paint::Warning));
        for (text, paint) in reasons.chain(self.notice.iter().map(|notice| (notice, Paint::Bad))) {
            let lines = words::wrapped(text, width).into_iter().take(MESSAGE_LINES_MAX);
            rows.extend(lines.map(|line| Line::from(self.painted(paint, line))));
        }
        rows
    }

    /// Two columns in the middle, the whole width above and below.
    fn wide(&self, figures: &Figures, width: usize, height: usize) -> Vec<Line<'static>> {
        let right = width.saturating_sub(LEFT_COLUMNS + 1);
        let [flows, requests] = [self.flows(figures), self.requests(figures)];
        let mut beside = requests.lines;
        for section in [self.hits(figures), self.troubles(figures)] {
            if !section.is_empty() {
                beside.extend(section.lines);
            }
        }
        let least = requests.least.max(flows.least);
        let middle =
            Section { lines: side_by_side(flows.lines, beside, [LEFT_COLUMNS, right]), least };
        let sections = vec![
            self.tiers(figures, width),
            middle,
            self.last_opens(figures, width),
            self.events(width),
        ];
        stacked(sections, height)
    }

    fn sections(&self, figures: &Figures, width: usize) -> Vec<Section> {
        vec![
            self.tiers(figures, width),
            self.flows(figures),
            self.troubles(figures),
            self.requests(figures),
            self.hits(figures),
            self.last_opens(figures, width),
            self.events(width),
        ]
    }

    fn tiers(&self, figures: &Figures, width: usize) -> Section {
        let mut title = "Tiers".to_owned();
        if let Some(pages) = figures.pages {
            // Writing to a String cannot fail.
            let _ = write!(title, "  {} pages", grouped(pages));
        }
        if let Some(open) = figures.open_files {
            let _ = write!(title, "  {} files open", grouped(open));
        }
        let lines: Vec<_> = figures.tiers.iter().map(|tier| self.tier(tier, width)).collect();
        let least = lines.len();
        Section::new(self.title(title), lines, least)
    }

    fn tier(&self, tier: &TierFigures, width: usize) -> Line<'static> {
        let is_wide = width >= usize::from(WIDE_COLUMNS);
        let mut parts = vec![Span::raw(format!("  {:<7}", tier.name))];
        let used = match tier.capacity_bytes {
            Some(capacity) => format!("{} of {}", bytes(tier.used_bytes), bytes(capacity)),
            None => bytes(tier.used_bytes),
        };
        if let Some(capacity) = tier.capacity_bytes {
            let percent = words::percent_of(tier.used_bytes, capacity);
            let full = u128::from(tier.used_bytes) * 100 >= u128::from(capacity) * 95;
            let paint = if full { Paint::Warning } else { Paint::Good };
            parts.push(Span::raw(format!("{percent:>PERCENT_COLUMNS$} ")));
            if is_wide {
                let bar = words::bar(tier.used_bytes, capacity, BAR_CHARACTERS);
                parts.push(self.painted(paint, format!("{bar} ")));
            }
        } else {
            let bar = if is_wide { BAR_CHARACTERS + 3 } else { 0 };
            parts.push(Span::raw(" ".repeat(PERCENT_COLUMNS + 1 + bar)));
        }
        parts.push(Span::raw(format!("{used:<22}")));
        let mut notes = Vec::new();
        notes.extend(
            tier.dirty_bytes
                .filter(|dirty| *dirty > 0)
                .map(|dirty| format!("{} not on disk yet", bytes(dirty))),
        );
        if tier.name == "disk" {
            notes.extend(tier.free_bytes.map(|free| format!("{} free", bytes(free))));
        }
        let waiting = tier.waiting_files.filter(|files| *files > 0);
        notes.extend(waiting.map(|files| format!("{} files wait", grouped(files))));
        parts.extend(notes.into_iter().map(|note| Span::raw(format!("  {note}"))));
        let state = tier.state.as_deref().filter(|state| *state != "up");
        let state = state.map(|state| format!("  {}", printable(state.chars())));
        parts.extend(state.map(|state| self.painted(Paint::Warning, state)));
        parts.push(Span::raw(format!("  {} objects", grouped(tier.objects))));
        Line::from(parts)
    }

    fn flows(&self, figures: &Figures) -> Section {
        let title = format!("{:<18}{:>7} {:>12}", "Rates", "/s", "bytes");
        let line = |flow: &Flow| {
            let [rate, moved] =
                [words::rate(flow.per_second), words::byte_rate(flow.bytes_per_second)];
            Line::from(format!("  {:<16}{rate:>7} {moved:>12}", flow.name))
        };
        Section::new(self.title(title), figures.flows.iter().map(line).collect(), 2)
    }

    fn requests(&self, figures: &Figures) -> Section {
        let title = format!("{:<14}{:>7}{:>7}{:>7}{:>6}", "Requests", "/s", "half", "99 %", "slow");
        let line = |requests: &Requests| {
            let [half, most] = [requests.half_seconds, requests.most_seconds].map(words::seconds);
            let known = format!(
                "  {:<12.12}{:>7}{half:>7}{most:>7}",
                requests.operation,
                words::rate(requests.per_second)
            );
            let slow = format!("{:>6}", grouped(requests.slow));
            let slow = if requests.slow > 0 {
                self.painted(Paint::Warning, slow)
            } else {
                Span::raw(slow)
            };
            Line::from(vec![Span::raw(known), slow])
        };
        Section::new(self.title(title), figures.requests.iter().map(line).collect(), 2)
    }

    fn hits(&self, figures: &Figures) -> Section {
        let title = format!("{:<22}{:>6}{:>12}", "Hits", "now", "since mount");
        let lines = figures.hits.iter().map(|hits| {
            let [now, always] =
                [words::percent(hits.share), words::percent(Some(hits.share_since_mount))];
            Line::from(format!("  {:<20}{now:>6}{always:>12}", hits.name))
        });
        Section::new(self.title(title), lines.collect(), 1)
    }

    fn troubles(&self, figures: &Figures) -> Section {
        let lines = figures.troubles.iter().map(|trouble| {
            let text = format!("  {} {}", grouped(trouble.count), printable(trouble.name.chars()));
            Line::from(self.painted(Paint::Warning, text))
        });
        Section::new(self.title("Trouble since the mount began"), lines.collect(), 1)
    }

    fn last_opens(&self, figures: &Figures, width: usize) -> Section {
        let all: u64 = figures.last_opens.iter().map(|last| last.opens).sum();
        let mut title = format!("Last {} opens", grouped(all));
        for (model, opens) in by_model(&figures.last_opens) {
            let model = printable(model.chars());
            // Writing to a String cannot fail.
            let _ = write!(title, "  {model} {}", words::percent_of(opens, all));
        }
        let lines = figures.last_opens.iter().map(|last| {
            let percent = words::percent_of(last.opens, all);
            let path = match last.path.as_str() {
                "-" => "elsewhere".to_owned(),
                path => words::path(path, width.saturating_sub(2 + PERCENT_COLUMNS + 2)),
            };
            Line::from(format!("  {percent:>PERCENT_COLUMNS$}  {path}"))
        });
        Section::new(self.title(title), lines.collect(), 3)
    }

    /// The newest one first; what happened to many files at once is one line.
    fn events(&self, width: usize) -> Section {
        let mut rows: Vec<(Event, usize)> = Vec::new();
        for event in self.events.iter().rev() {
            let kind = |event: &Event| (event.time(), event.what.clone(), event.reason.clone());
            match rows.last_mut() {
                Some((all, others)) if kind(all) == kind(event) => {
                    *others += 1;
                    all.files = all.files.saturating_add(event.files);
                    let bytes = |(one, other): (u64, u64)| one.saturating_add(other);
                    all.bytes = all.bytes.zip(event.bytes).map(bytes);
                }
                _ => rows.push((event.clone(), 0)),
            }
        }
        rows.truncate(EVENT_ROWS_MAX);
        let lines = rows.iter().map(|(event, others)| event_line(event, *others, width));
        Section::new(self.title("Events (UTC)"), lines.collect(), 2)
    }
}

/// Something that happened, and to how many others beside what is named.
fn event_line(event: &Event, others: usize, width: usize) -> Line<'static> {
    let time = event.time();
    let time = time.split_once(' ').map_or("", |(_, time)| time);
    let what = printable(event.what.chars());
    let begin = format!("  {:<8}  {what:<9}  ", printable(time.chars()));
    let more = if others > 0 { format!(" and {others} more") } else { String::new() };
    let (place, why) = (event.place(), event.why());
    // The end of a path tells one from the other, and the reason should be seen as well.
    let room = width.saturating_sub(begin.chars().count() + more.len());
    let place = words::path(&place, room.saturating_sub(why.chars().count() + 2).max(room / 2));
    Line::from(format!("{begin}{place}{more}  {why}"))
}

/// `500ms` or `2s`, as it is written on the command line.
fn interval_text(interval: Duration) -> String {
    match interval.subsec_millis() {
        0 => format!("{} s", interval.as_secs()),
        _ => format!("{} ms", interval.as_millis()),
    }
}

/// Opens by model, the most first.
fn by_model(last_opens: &[LastOpens]) -> Vec<(&str, u64)> {
    let mut opens = BTreeMap::<&str, u64>::new();
    for last in last_opens {
        if let Some(model) = words::model_of(&last.path) {
            *opens.entry(model).or_default() += last.opens;
        }
    }
    let mut opens: Vec<_> = opens.into_iter().collect();
    opens.sort_by_key(|(_, opens)| Reverse(*opens));
    opens
}

/// How something stands out on the screen.
fn look(paint: Paint, style: Style) -> Look {
    if !style.is_coloured {
        return Look::default();
    }
    match paint {
        Paint::Heading => Look::default().add_modifier(Modifier::BOLD),
        Paint::Good => Look::default().fg(Color::Green),
        Paint::Warning => Look::default().fg(Color::Yellow),
        Paint::Bad => Look::default().fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}

#[cfg(test)]
mod tests;
