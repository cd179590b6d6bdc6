import SwiftUI

/// The chat, with what it remembers above it.
struct ChatView: View {
    @State private var chat = Chat()
    @State private var draft = ""
    @Environment(\.scenePhase) private var phase

    var body: some View {
        VStack(spacing: 12) {
            if let problem = chat.problem { Text(problem).foregroundStyle(.red) }
            if let memory = chat.memory {
                MemoryView(memory: memory, tokensPerSecond: chat.tokensPerSecond)
            }
            ScrollView {
                LazyVStack(alignment: .leading, spacing: 8) {
                    ForEach(chat.messages) { message in
                        Text(message.text)
                            .padding(10)
                            .background(
                                message.isUser ? Color.accentColor.opacity(0.2) : .clear,
                                in: .rect(cornerRadius: 12))
                    }
                }
            }
            .defaultScrollAnchor(.bottom)
            HStack(alignment: .bottom) {
                Button("New", systemImage: "square.and.pencil") { Task { await chat.clear() } }
                // Of several lines, so that the return key begins the next one.
                TextField("Message", text: $draft, axis: .vertical)
                    .textFieldStyle(.roundedBorder)
                if chat.reply == nil {
                    Button("Send", systemImage: "arrow.up.circle.fill", action: send)
                        .disabled(draft.isEmpty)
                } else {
                    Button("Stop", systemImage: "stop.circle.fill", action: chat.stop)
                }
            }
            .labelStyle(.iconOnly)
        }
        .padding()
        .task {
            // The folder reference Model of the app's target.
            await chat.load(from: Bundle.main.bundleURL.appendingPathComponent("Model"))
        }
        // In the background the GPU may not be used, and the system ends an app that does.
        .onChange(of: phase) { if phase != .active { chat.stop() } }
    }

    private func send() {
        chat.send(draft)
        draft = ""
    }
}
