import ChatEngine
import SwiftUI

/// Which tokens are still held, the memory they take, and the speed.
struct MemoryView: View {
    let frame: ChatEngine.Frame

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            // A column per token: the darker, the more heads of the model hold it.
            Canvas { context, size in
                let width = size.width / Double(max(frame.held.count, 1))
                for (i, share) in frame.held.enumerated() {
                    let column = CGRect(
                        x: Double(i) * width, y: 0, width: max(width, 0.5), height: size.height)
                    context.fill(Path(column), with: .color(.accentColor.opacity(share)))
                }
            }
            .frame(height: 28)
            .accessibilityLabel("Tokens held")
            HStack {
                Text("\(frame.tokens) tokens")
                Spacer()
                Text(Int64(frame.nbytes), format: .byteCount(style: .memory))
                Spacer()
                Text("\(frame.tokensPerSecond, specifier: "%.1f") tokens/s")
            }
            .font(.caption.monospacedDigit())
        }
    }
}
