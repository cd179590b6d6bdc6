import SwiftUI

/// Which tokens the caches hold, the memory they take, and the speed.
struct MemoryView: View {
    let memory: MemoryUse
    let tokensPerSecond: Double

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            // A column per token: the darker, the more heads of the model hold it.
            Canvas { context, size in
                let width = size.width / Double(max(memory.fractions.count, 1))
                for (i, fraction) in memory.fractions.enumerated() {
                    let column = CGRect(
                        x: Double(i) * width, y: 0, width: max(width, 0.5), height: size.height)
                    context.fill(Path(column), with: .color(.accentColor.opacity(fraction)))
                }
            }
            .frame(height: 28)
            .accessibilityLabel("Tokens held")
            HStack {
                Text("\(memory.tokens) tokens")
                Spacer()
                Text(Int64(memory.bytes), format: .byteCount(style: .memory))
                Spacer()
                Text("\(tokensPerSecond, specifier: "%.1f") tokens/s")
            }
            .font(.caption.monospacedDigit())
        }
    }
}
