//! Values over steps, reduced to what a chart can show.

/// Values of a key over steps; `NaN` represents a value that is not finite.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Series(pub(super) Vec<(u64, f64)>);

/// Steps and means, with gaps where no value is finite.
pub(super) type Means = Vec<Option<(f64, f64)>>;

/// Consecutive steps, drawn as one place of a line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bucket {
    pub(super) step: f64,
    pub(super) min: f64,
    pub(super) mean: f64,
    pub(super) max: f64,
}

impl Series {
    pub(super) fn finite(&self) -> impl Iterator<Item = f64> + '_ {
        self.0.iter().map(|point| point.1).filter(|value| value.is_finite())
    }

    pub(super) fn last(&self) -> Option<f64> {
        self.0.iter().rev().map(|point| point.1).find(|value| value.is_finite())
    }

    pub(super) fn max(&self) -> Option<f64> {
        self.finite().reduce(f64::max)
    }

    pub(super) fn sum(&self) -> f64 {
        self.finite().sum()
    }

    pub(super) fn median(&self) -> Option<f64> {
        let mut values: Vec<f64> = self.finite().collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }

    /// Steps whose value is not finite.
    pub(super) fn gaps(&self) -> Vec<u64> {
        let gaps = self.0.iter().filter(|(_, value)| !value.is_finite());
        gaps.map(|(step, _)| *step).collect()
    }

    /// At most `count` buckets of consecutive values, with `None` where values are missing.
    pub(super) fn buckets(&self, count: usize) -> Vec<Option<Bucket>> {
        let size = self.0.len().div_ceil(count.max(1)).max(1);
        let bucket = |points: &[(u64, f64)]| {
            let finite = points.iter().filter(|(_, value)| value.is_finite());
            let (mut number, mut steps, mut sum) = (0.0, 0.0, 0.0);
            let (mut min, mut max) = (f64::INFINITY, f64::NEG_INFINITY);
            for (step, value) in finite {
                number += 1.0;
                steps += *step as f64;
                sum += value;
                (min, max) = (min.min(*value), max.max(*value));
            }
            (number > 0.0).then(|| Bucket { step: steps / number, min, mean: sum / number, max })
        };
        self.0.chunks(size).map(bucket).collect()
    }

    /// Steps and running means of at most `count` buckets, with the gaps of the values, and over how
    /// many steps; `None` for few values. A mean is over as many buckets before a place as after
    /// it: fewer at the start, where values fall fast, and only those before at the end.
    pub(super) fn smoothed(&self, count: usize) -> Option<(Means, usize)> {
        const MIN_VALUES: usize = 20;
        let buckets = self.buckets(count);
        if buckets.len() < MIN_VALUES {
            return None;
        }
        let half = (buckets.len() / 50).max(2);
        let mean = |(index, bucket): (usize, &Option<Bucket>)| {
            let step = bucket.as_ref()?.step;
            let half = half.min(index);
            let near = &buckets[index - half..buckets.len().min(index + half + 1)];
            let near: Vec<f64> = near.iter().flatten().map(|bucket| bucket.mean).collect();
            Some((step, near.iter().sum::<f64>() / near.len() as f64))
        };
        let size = self.0.len().div_ceil(buckets.len());
        Some((buckets.iter().enumerate().map(mean).collect(), (2 * half + 1) * size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_keeps_the_smallest_and_the_largest_value() {
        let mut values: Vec<(u64, f64)> = (1..=1000).map(|step| (step, 1.0)).collect();
        (values[500].1, values[501].1, values[502].1) = (9.0, -3.0, f64::NAN);
        let buckets = Series(values).buckets(10);
        assert_eq!(buckets.len(), 10);
        let found = buckets[5].unwrap();
        assert_eq!((found.min, found.max), (-3.0, 9.0));
        assert_eq!(buckets[0], Some(Bucket { step: 50.5, min: 1.0, mean: 1.0, max: 1.0 }));
    }

    #[test]
    fn values_that_are_not_finite_leave_a_gap() {
        let series = Series(vec![(1, 1.0), (2, f64::NAN), (3, 3.0)]);
        let buckets = series.buckets(10);
        let values: Vec<_> = buckets.iter().map(|b| b.map(|b| b.mean)).collect();
        assert_eq!(values, [Some(1.0), None, Some(3.0)]);
        assert_eq!(series.gaps(), [2]);
    }

    #[test]
    fn a_smoothed_line_follows_a_slope_keeps_gaps_and_ignores_values_that_are_not_finite() {
        let mut values: Vec<(u64, f64)> = (1..=100).map(|step| (step, step as f64)).collect();
        values[49].1 = f64::NAN;
        let (means, over) = Series(values.clone()).smoothed(1000).unwrap();
        assert_eq!((means.len(), over), (100, 5));
        assert_eq!(means[0], Some((1.0, 1.0)), "the first value stays");
        assert_eq!(means[30], Some((31.0, 31.0)), "a slope is not shifted");
        assert_eq!(means[49], None);
        assert_eq!(means[50], Some((51.0, (49.0 + 51.0 + 52.0 + 53.0) / 4.0)));
        assert_eq!(means[99], Some((100.0, 99.0)));
        assert!(Series(values[..19].to_vec()).smoothed(1000).is_none());
        // a long run: buckets of 10 steps
        let long = Series((0..1000).map(|step| (step, 1.0)).collect());
        let (means, over) = long.smoothed(100).unwrap();
        assert_eq!((means.len(), over), (100, 50));
        assert!(means.iter().flatten().all(|(_, mean)| *mean == 1.0));
    }
}
