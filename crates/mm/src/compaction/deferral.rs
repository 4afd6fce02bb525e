//! Deferral: a compaction that failed is not tried again at once.
//!
//! After a pass that found nothing for an order, the next `1 << shift` attempts for that order (and larger ones) are
//! refused. The shift grows with each failure, up to [`MAX_SHIFT`]. The first attempt after the longest refusal is a
//! *restart*, as what is remembered of the zone is out of date then.

/// The largest shift: 64 attempts.
pub const MAX_SHIFT: u32 = 6;

/// Which attempts to refuse.
#[derive(Clone, Copy, Debug)]
pub struct Deferral {
    /// Attempts since the last failure.
    considered: u32,
    shift: u32,
    /// The smallest order that failed.
    order_failed: u8,
}

impl Default for Deferral {
    fn default() -> Self {
        Self { considered: 0, shift: 0, order_failed: u8::MAX }
    }
}

impl Deferral {
    /// Whether to refuse an attempt for `order`. Each call counts as an attempt.
    pub fn is_deferred(&mut self, order: u8) -> bool {
        if order < self.order_failed {
            return false;
        }
        self.considered = (self.considered + 1).min(1 << self.shift);
        self.considered < 1 << self.shift
    }

    /// Whether the current attempt is the first after the longest refusal.
    pub fn is_restarting(&self, order: u8) -> bool {
        order >= self.order_failed && self.shift == MAX_SHIFT && self.considered >= 1 << MAX_SHIFT
    }

    /// A whole pass for `order` failed.
    pub fn defer(&mut self, order: u8) {
        self.considered = 0;
        self.shift = (self.shift + 1).min(MAX_SHIFT);
        self.order_failed = self.order_failed.min(order);
    }

    /// A run of `order` should be free now; with `success` it was even allocated.
    pub fn reset(&mut self, order: u8, success: bool) {
        if success {
            (self.considered, self.shift) = (0, 0);
        }
        if order >= self.order_failed {
            self.order_failed = order + 1;
        }
    }

    /// The current shift.
    pub fn shift(&self) -> u32 {
        self.shift
    }
}
