import MLX

/// Queries and a layer give out, scores, masses.
extension Layer {
    /// Attention of new tokens, and what it tells about the slots.
    ///
    /// - Parameters:
    ///   - tokens: Those that were taken in last.
    ///   - attended: What they attend to.
    /// - Returns: `[B, Hq, L, Dv]`, and the same slots with their scores brought up to date.
    func observe(
        _ tokens: NewTokens, _ attended: [AttendedSlots]
    ) -> (output: MLXArray, seen: [AttendedSlots]) {
        let group = tokens.queries.dim(1) / store.heads
        var outputs: [MLXArray] = [], seen = attended
        for (i, part) in attended.enumerated() {
            let heads = part.run.first * group ..< part.run.last * group
            let result = observe(tokens.queryHeads(heads), part)
            outputs.append(result.output)
            seen[i].windowMass = result.windowMass
            guard let scores = result.scores else { continue }
            seen[i].fields["scores"] = scores.slicedLast(0 ..< part.count)
            if window != nil {
                seen[i].newestScores = scores.slicedLast(part.count ..< scores.dim(2))
            }
        }
        return (joined(outputs, axis: 1), seen)
    }

    /// The same of one run: output, new scores of all its rows, and the mass of the prompt's window.
    private func observe(
        _ tokens: NewTokens, _ attended: AttendedSlots
    ) -> (output: MLXArray, scores: MLXArray?, windowMass: MLXArray?) {
        let call = call(tokens, attended), whole = positionsAndScores(attended)
        let policy = settings.policy, window = policy.options.window
        let L = tokens.count, N = call.keys.shape[2], looks = policy.needsAttention
        let windowed = looks && L > 1 && policy.options.prompt == .window
        // Queries before this one are attended to and not looked at.
        let firstSeen = windowed ? L - min(window, L) : (looks ? 0 : L)
        var outputs: [MLXArray] = [], scores = whole["scores"], windowMass: MLXArray?
        if firstSeen > 0 { outputs.append(Backend.current.attention(call(0 ..< firstSeen))) }
        // A window is one block, and so is whatever leaves no logits behind.
        let block = windowed || type(of: policy).sumsMass ? L : Reference.queryBlock
        for start in stride(from: firstSeen, to: L, by: block) {
            let range = start ..< min(start + block, L), part = call(range)
            let (output, seen) = look(part), length = part.keys.shape[2]
            outputs.append(output)
            if windowed {
                windowMass = self.windowMass(seen, whole, L)
                seen.standsFor = standsFor(L: L, N: N, window: range.count)
            }
            let found = policy.accumulate(scores!.slicedLast(0 ..< length), seen: seen)
            scores =
                length < N
                ? concatenated([found, scores!.slicedLast(length ..< N)], axis: -1) : found
        }
        return (joined(outputs, axis: 2), scores, windowMass)
    }

    /// Attention of new tokens to one run, as a whole.
    private func call(_ tokens: NewTokens, _ attended: AttendedSlots) -> RunCall {
        let (keys, values) = keysAndValues(attended)
        let answers = settings.remainderAnswers && attended.evicted > 0
        return RunCall(
            tokens: tokens, keys: keys, values: values,
            remainder: answers ? remainder.heads(attended.run.range) : nil,
            saturation: saturation.sliced(attended.run.range, axis: 0))
    }

    /// Attention, with what the policy observes of it.
    private func look(_ call: AttentionCall) -> (output: MLXArray, seen: PolicyObservation) {
        if type(of: settings.policy).sumsMass {
            let result = Backend.current.attentionWithMass(call)
            return (result.output, PolicyObservation(mass: result.mass))
        }
        let result = Backend.current.attentionWithScores(call)
        return (
            result.output,
            PolicyObservation(
                logits: result.scores, logSumExp: result.logSumExp, heads: call.keys.shape[1])
        )
    }

    /// Mass of the last `window` queries of the whole prompt, `[B, H, N]`.
    ///
    /// A chunk shorter than the window lacks queries of earlier chunks; each slot's mean mass per
    /// step stands in for them.
    private func windowMass(_ seen: PolicyObservation, _ fields: Fields, _ L: Int) -> MLXArray {
        let policy = settings.policy, missing = policy.options.window - L
        if missing <= 0 { return seen.mass }
        let begun = maximum(PinnedPositions.unmarked(fields["positions"]!), Int32(agedFrom))
        let ages = maximum(Int32(offset - L) - begun, Int32(1)).asType(.float32)
        return seen.mass + Float(missing) * policy.meanMass(fields["scores"]!, ages: ages)
    }
}

/// New tokens and all rows of a run.
private struct RunCall {
    let tokens: NewTokens
    let keys: Rows
    let values: Rows
    /// What stays of the evicted, where it answers.
    let remainder: Remainder?
    /// Where it saturates, `[heads]`.
    let saturation: MLXArray

    /// The attention of some queries, over the keys that they can see.
    func callAsFunction(_ range: Range<Int>) -> AttentionCall {
        let block = tokens.mask.block(
            range, L: tokens.count, N: keys.shape[2], newColumnsOnly: true)
        let queries = tokens.queries.sliced(range, axis: 2)
        return AttentionCall(
            queries: queries, keys: keys.sliced(0 ..< block.keys, axis: 2),
            values: values.sliced(0 ..< block.keys, axis: 2), scale: tokens.scale,
            mask: block.mask, sinks: tokens.sinks,
            seed: remainder.map {
                (
                    $0.column(queries: queries, scale: tokens.scale, saturation: saturation),
                    $0.meanValue
                )
            })
    }
}

/// How many of a chunk's L queries each of a window's queries stands for, per slot `[N]`.
///
/// Every old slot was seen by all L queries and by `window` of them in the window; new row j by
/// L - j and by min(window, L - j).
func standsFor(L: Int, N: Int, window: Int) -> MLXArray {
    let old = Array(repeating: Float(Double(L) / Double(window)), count: N - L)
    let new = (0 ..< L).map { Float(L - $0) / Float(min(L - $0, window)) }
    return MLXArray(old + new)
}
